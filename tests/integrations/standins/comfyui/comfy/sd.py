"""Loading checkpoints: returns what it was asked for in place of models."""

from __future__ import annotations


def load_checkpoint_guess_config(
    ckpt_path: str, *, output_vae: bool, output_clip: bool, embedding_directory: list[str]
) -> tuple[object, ...]:
    with open(ckpt_path, "rb") as file:
        return file.read(), output_clip and output_vae, (ckpt_path, embedding_directory), None
