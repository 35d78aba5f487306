"""Groups on the wire: one msgpack header, then raw frames. No pickle, no copies of array data that is worth a frame.

    message = [ msgpack header | all arrays below JOINT_BELOW, one behind the other | array | array | ... ]
    header  = {"type": ..., "schema": 2, ..., "groups": [ {ids, lengths, "arrays": description}, ... ]}

    Group ─ encode_groups ─► frames ─ send_frames ─► socket ─ receive_frames ─► unpack_header ─ decode_groups ─► Group

The arrays of a group, of which the rewards are one, come in the order in which they are described, see
:mod:`async_rl.wire.layout`: the small ones in a frame that all groups share (:mod:`async_rl.wire.joint`), each filled
up to a multiple of 8 bytes, because a frame costs more than to copy them; each larger one in a frame of its own. What
was decoded remembers its frames, so that it goes on to the journal and to the learner as it came. An annotation is
described by its stage and the number of its values, which are one frame. Whatever does not fit is refused with a
:class:`~async_rl.errors.WireError` whose ``reason`` the server counts.
"""

from async_rl.wire.annotations import decode_annotations, encode_annotations
from async_rl.wire.groups import decode_groups, encode_groups
from async_rl.wire.header import LIMITS, SCHEMA_VERSION, Frame, Header, Limits, pack_header, unpack_header
from async_rl.wire.layout import JOINT_BELOW
from async_rl.wire.sockets import receive_frames, send_frames

__all__ = [
    "JOINT_BELOW",
    "LIMITS",
    "SCHEMA_VERSION",
    "Frame",
    "Header",
    "Limits",
    "decode_annotations",
    "decode_groups",
    "encode_annotations",
    "encode_groups",
    "pack_header",
    "receive_frames",
    "send_frames",
    "unpack_header",
]
