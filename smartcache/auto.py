"""Import it to turn the flag on for all calls of diffusers and transformers, if `SMARTCACHE=1`.

    import smartcache.auto

`smart_cache=False` at a call turns it off for that call. Without the variable (or `everywhere` in
the config file) nothing happens. Neither library is imported.
"""

from smartcache.config import load_settings
from smartcache.pretrained import enable

if load_settings().everywhere:
    enable(always=True)
