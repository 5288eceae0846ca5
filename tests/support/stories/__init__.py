"""Sets a scene of several parts of Tiphys, and tells what happens in it step by step."""
