"""Has runs go on by themselves: what is known of a run that does not run, whether to resume it, and the brakes.

Pure decisions (`decide`, `brakes`, `health`) beside the adapters that read a run (`look`) and act (`attendant`).
"""
