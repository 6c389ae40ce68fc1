"""Whether a load drew random numbers: then some weights came out of no file."""

from __future__ import annotations


class Dice:
    """Torch's random numbers and default dtype at one moment."""

    def __init__(self) -> None:
        import torch

        self._states = _states()
        self._dtype = torch.get_default_dtype()

    def were_thrown(self) -> bool:
        """Say whether random numbers were drawn since."""
        return _states() != self._states

    def put_back(self) -> None:
        """Go back to that moment, so that whoever loads next gets what he would have got then."""
        import torch

        for number, state in enumerate(self._states):
            values = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            if number:
                torch.cuda.set_rng_state(values, number - 1)
            else:
                torch.set_rng_state(values)
        # diffusers leaves it as it needed it when a load fails.
        torch.set_default_dtype(self._dtype)


def _states() -> list[bytes]:
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return [each.numpy().tobytes() for each in states]
