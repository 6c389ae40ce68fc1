"""The group `smartcache artifacts`; its commands are loaded when they are called."""

from __future__ import annotations

from smartcache.cli._command import lazy_group

_COMMANDS = {
    "ls": ("artifacts_ls", "List the sets of artifacts, and how sets of one name differ."),
    "show": ("artifacts_show", "Show a set, or one artifact of it, without reading tensors."),
    "rm": ("artifacts_rm", "Remove whole sets, or artifacts of one."),
    "prune": ("artifacts_prune", "Evict old artifacts, and free what is expired or dead."),
    "verify": ("artifacts_verify", "Read everything again and compare it with its checksums."),
    "compact": ("artifacts_prune", "Free the space of artifacts that are gone."),
    "export": ("artifacts_carry", "Write a set to safetensors, or to a folder."),
    "import": ("artifacts_carry", "Bring in an exported set, or tensor files of others."),
}
"""Command: its module and its short help, which must be the first sentence of its docstring."""

artifacts_command = lazy_group(
    "artifacts",
    text="Look after computed tensors, set by set.",
    modules=_COMMANDS,
    examples=(
        ("smartcache artifacts ls", "all sets, and how those of one name differ"),
        ("smartcache artifacts show sdxl-latents", "fingerprint, figures, fields"),
        ("smartcache artifacts prune --unused-for 90d", "evict what was not used for 90 days"),
    ),
)
