"""A Hub on the loopback, for unmodified clients: huggingface_hub, transformers, diffusers, `hf`.

    with Hub() as hub:
        commit = hub.add("org/name", {"config.json": b"{}", "model.safetensors": weights})
        huggingface_hub.snapshot_download("org/name", endpoint=hub.url, cache_dir=cache)
        assert hub.fetched_bytes("model.safetensors") == len(weights)
        hub.clear()
        subprocess.run(["hf", "download", "org/name"], env={**os.environ, **hub.environment})
        assert hub.gets("model.safetensors") == []

huggingface_hub reads its variables when it is imported: in this process pass `endpoint=hub.url`, to
a child process pass `hub.environment`. What can be set at any time: `hub.page_size`, `hub.cdn`,
`hub.bandwidth`, `hub.tokens`, `hub.xet_headers`, and `hub.faults` (what goes wrong, how often).

`HubProcess` is the same in a process of its own, for benchmarks; `pipelines` makes what is served.
Only the standard library is needed, except in `pipelines`.
"""

from tests.hub_server.faults import Hold
from tests.hub_server.log import Request
from tests.hub_server.process import HubProcess
from tests.hub_server.repos import Commit, HubFile, etag_of, git_sha1
from tests.hub_server.server import Hub

__all__ = ["Commit", "Hold", "Hub", "HubFile", "HubProcess", "Request", "etag_of", "git_sha1"]
