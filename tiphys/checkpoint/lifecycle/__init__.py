"""How a training process ends: preemption, crashes, hangs and lack of memory."""
