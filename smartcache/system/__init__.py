"""The operating system, in plain words: system calls, filesystems, locks, hashing, SQLite.

Nothing here knows of blobs. Whatever differs from one system to another stands here and nowhere
else. This is all of it that the rest of smartcache uses.
"""

from __future__ import annotations

from smartcache.system.faults import reached as reached
from smartcache.system.filesystems import Abilities as Abilities
from smartcache.system.filesystems import Family as Family
from smartcache.system.filesystems import Mount as Mount
from smartcache.system.filesystems import Room as Room
from smartcache.system.filesystems import filesystem_id as filesystem_id
from smartcache.system.filesystems import free_bytes as free_bytes
from smartcache.system.filesystems import is_network as is_network
from smartcache.system.filesystems import mount_of as mount_of
from smartcache.system.filesystems import mount_points as mount_points
from smartcache.system.filesystems import nearest_existing as nearest_existing
from smartcache.system.filesystems import need_room as need_room
from smartcache.system.filesystems import probe as probe
from smartcache.system.hashing import BUFFER_SIZE as BUFFER_SIZE
from smartcache.system.hashing import Advance as Advance
from smartcache.system.hashing import Algorithm as Algorithm
from smartcache.system.hashing import Crew as Crew
from smartcache.system.hashing import Hasher as Hasher
from smartcache.system.hashing import Hashes as Hashes
from smartcache.system.hashing import check_hex as check_hex
from smartcache.system.hashing import digest_at_once as digest_at_once
from smartcache.system.hashing import hash_file as hash_file
from smartcache.system.hashing import hash_many as hash_many
from smartcache.system.hashing import is_digest as is_digest
from smartcache.system.hashing import threads_for as threads_for
from smartcache.system.kernel import LATEST_NS as LATEST_NS
from smartcache.system.kernel import RACY_NS as RACY_NS
from smartcache.system.kernel import Extent as Extent
from smartcache.system.kernel import Lease as Lease
from smartcache.system.kernel import StatKey as StatKey
from smartcache.system.kernel import allocated_bytes as allocated_bytes
from smartcache.system.kernel import boot_id as boot_id
from smartcache.system.kernel import clone as clone
from smartcache.system.kernel import dedupe_range as dedupe_range
from smartcache.system.kernel import drop_lease as drop_lease
from smartcache.system.kernel import effective_user as effective_user
from smartcache.system.kernel import exchange as exchange
from smartcache.system.kernel import extents as extents
from smartcache.system.kernel import is_supported as is_supported
from smartcache.system.kernel import lease_intact as lease_intact
from smartcache.system.kernel import link_fd as link_fd
from smartcache.system.kernel import open_quietly as open_quietly
from smartcache.system.kernel import open_unnamed as open_unnamed
from smartcache.system.kernel import open_without_symlinks as open_without_symlinks
from smartcache.system.kernel import preallocate as preallocate
from smartcache.system.kernel import reserve as reserve
from smartcache.system.kernel import shares_blocks as shares_blocks
from smartcache.system.kernel import sync_directory as sync_directory
from smartcache.system.kernel import take_lease as take_lease
from smartcache.system.locks import Claim as Claim
from smartcache.system.locks import KeyLocks as KeyLocks
from smartcache.system.locks import OnWait as OnWait
from smartcache.system.locks import Patience as Patience
from smartcache.system.locks import claim as claim
from smartcache.system.locks import is_free as is_free
from smartcache.system.locks import lock as lock
from smartcache.system.locks import try_lock as try_lock
from smartcache.system.locks import unlock as unlock
from smartcache.system.locks import wait_for as wait_for
from smartcache.system.ownfiles import atomically as atomically
from smartcache.system.ownfiles import check_own as check_own
from smartcache.system.ownfiles import create_own as create_own
from smartcache.system.ownfiles import make_or_open_own as make_or_open_own
from smartcache.system.ownfiles import make_own as make_own
from smartcache.system.ownfiles import open_own as open_own
from smartcache.system.ownfiles import read_own as read_own
from smartcache.system.sqlite import Database as Database
from smartcache.system.sqlite import number_of as number_of
from smartcache.system.sqlite import of_row as of_row
from smartcache.system.sqlite import signed as signed
