"""What a filesystem may lack, for races and kills, too."""

from tests.store.conftest import at_point, no_exchange, no_leases

__all__ = ["at_point", "no_exchange", "no_leases"]
