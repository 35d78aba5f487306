import os

from async_rl.buffer import reserve
from async_rl.buffer.memory import keep_free_memory
from async_rl.buffer.reserve import AHEAD_BYTES, Reserve


def test_space_is_reserved_behind_the_end_of_a_large_file_whose_size_and_content_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(reserve, "_FROM_BYTES", 8)
    path = tmp_path / "events"
    with open(path, "wb") as file:
        space = Reserve(file.fileno())
        space.reach(8)
        assert os.fstat(file.fileno()).st_blocks == 0
        space.reach(9)
        blocks = os.fstat(file.fileno()).st_blocks
        assert blocks in (0, *range(AHEAD_BYTES // 512, AHEAD_BYTES // 512 + 64))  # 0: no such file system
        file.write(b"123456789")
        file.flush()
        space.reach(9 + AHEAD_BYTES)  # still within what was reserved
        assert os.fstat(file.fileno()).st_size == 9
        assert os.fstat(file.fileno()).st_blocks <= blocks + 64
    assert path.read_bytes() == b"123456789"


def test_a_file_that_takes_no_reserve_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(reserve, "_FROM_BYTES", 8)
    read, write = os.pipe()
    Reserve(write).reach(100)
    os.write(write, b"x")
    assert os.read(read, 1) == b"x"
    os.close(read)
    os.close(write)


def test_the_allocator_takes_its_setting_where_it_has_one():
    assert keep_free_memory() is True
