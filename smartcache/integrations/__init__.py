"""Other programs with smartcache inside: trainers, ComfyUI, mgds, easydata.

Each module is for one of them and is imported by it or by its user; none imports another.
"""
