"""The group `smartcache artifacts`; its commands are loaded when they are called."""

from __future__ import annotations

from smartcache.cli._command import lazy_group

_COMMANDS = {
    "ls": ("artifacts_ls", "List the sets of artifacts, and what tells sets of one name apart."),
    "show": ("artifacts_show", "Show a set, or one artifact of it, without reading tensors."),
    "rm": ("artifacts_rm", "Remove whole sets, or artifacts of one."),
    "prune": ("artifacts_prune", "Evict old artifacts, and free what is expired or dead."),
    "verify": ("artifacts_verify", "Read everything again and compare it with its checksums."),
    "compact": ("artifacts_prune", "Give back the room of artifacts that are gone."),
}
"""Command: its module and its short help, which must be the first sentence of its docstring."""

artifacts_command = lazy_group(
    "artifacts",
    text="Look after computed tensors, set by set.",
    modules=_COMMANDS,
    examples=(
        ("smartcache artifacts ls", "all sets, and what tells those of one name apart"),
        ("smartcache artifacts show sdxl-latents", "fingerprint, figures, fields"),
        ("smartcache artifacts prune --unused-for 90d", "evict what was not used for so long"),
    ),
)
