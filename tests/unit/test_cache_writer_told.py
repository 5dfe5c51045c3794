"""Who is told about a piece, by the writer's thread or while offering, and what they may do then."""

from __future__ import annotations

import threading
from pathlib import Path

from mlxpool.shared.kv.names import BLOCK_BYTES
from mlxpool.worker.cache.records import Piece
from mlxpool.worker.cache.writer import Writer
from tests.unit.kv_world import PATIENCE_S, PLENTY, chain, open_tier, tokens, waiting


def test_a_piece_offered_again_while_its_loss_is_told_is_tried_again(tmp_path: Path) -> None:
    item = waiting(*chain(tokens(256))[0])
    said: list[bool] = []
    twice = threading.Event()

    def wrote(piece: Piece, durable: bool) -> None:
        said.append(durable)
        if len(said) == 1:
            writer.offer(item)
        else:
            twice.set()

    writer = Writer(open_tier(tmp_path, max_bytes=2 * BLOCK_BYTES), PLENTY, lambda: False, wrote)
    writer.offer(item)
    assert twice.wait(PATIENCE_S), "nobody would ever hear of it again"
    assert said == [False, False]
    assert (writer.pending, writer.pending_bytes, writer.dropped) == (0, 0, 2)
    writer.close()


def test_a_flush_waits_until_everybody_was_told(tmp_path: Path) -> None:
    told, gate = threading.Event(), threading.Event()
    said: list[bool] = []

    def wrote(piece: Piece, durable: bool) -> None:
        told.set()
        assert gate.wait(PATIENCE_S)
        said.append(durable)

    writer = Writer(open_tier(tmp_path), PLENTY, lambda: False, wrote)
    writer.offer(waiting(*chain(tokens(256))[0]))
    assert told.wait(PATIENCE_S)
    assert not writer.flush(0.01)
    gate.set()
    assert writer.flush(PATIENCE_S)
    assert said == [True]
    writer.close()
