"""Models on disk, written by hand: as a pull leaves them, and as the hub's cache holds them."""

import json
from pathlib import Path

from lean.store.installed import list_models
from lean.store.pull import ARTEFACTS, MANIFEST

NAME = "smollm2-135m"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
COMMIT, OTHER = "1" * 40, "2" * 40
CHECKPOINT = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"w" * 5000}


def write_model(folder, config=CONFIG, weights=1000, sha256=None):
    """A folder as a pull leaves it; returns its bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"w" * weights)
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    manifest = {"source": "x", "sha256": sha256 or ARTEFACTS[NAME].member_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return sum(file.stat().st_size for file in folder.iterdir())


def write_repo(hub, repo_id, revisions, main=None):
    """A repository in the hub's cache by hand: ``revisions`` is {commit: {file: content}}; returns its folder."""
    repo = hub / ("models--" + repo_id.replace("/", "--"))
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    for commit, files in revisions.items():
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, content in files.items():
            blob = repo / "blobs" / f"{hash(content) & (2**64 - 1):016x}"
            blob.write_bytes(content)
            (snapshot / name).symlink_to(Path("../../blobs", blob.name))
    (repo / "refs" / "main").write_text(main or list(revisions)[-1])
    return repo


def listed():
    return {model.name: model for model in list_models()}
