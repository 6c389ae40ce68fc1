"""The flag `smart_cache=True` in the libraries' own functions: opt-in, and taken back wholly.

with smartcache.enable():
    pipeline = DiffusionPipeline.from_pretrained("org/name", smart_cache=True)
"""

from smartcache.integrations.switch import Enabled, disable, enable

__all__ = ["Enabled", "disable", "enable"]
