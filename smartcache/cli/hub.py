"""The group `smartcache hub`; each of its commands has a module of its own, loaded when called."""

from __future__ import annotations

from smartcache.cli._command import lazy_group

_COMMANDS = {
    "ls": ("hub_ls", "List the repos in HF caches with their own and shared bytes."),
    "rm": ("hub_rm", "Remove repos or revisions, and say what that really frees."),
    "prune": ("hub_rm", "Remove revisions that no ref points to, and partial downloads."),
    "verify": ("hub_verify", "Compare the files of repos with the hashes the Hub announced."),
    "export": ("hub_export", "Write repos to a folder or tar file, each blob once."),
    "import": ("hub_import", "Bring exported repos into the HF cache, verified."),
}
"""Command: its module and its short help, which must be the first sentence of its docstring."""

hub_command = lazy_group(
    "hub",
    text="Look after the Hugging Face repos on this machine.",
    modules=_COMMANDS,
    examples=(
        ("smartcache hub ls", "repos, and what each shares"),
        ("smartcache hub verify", "every file against its announced hash, offline"),
        ("smartcache hub rm org/name", "remove a repo"),
    ),
)
