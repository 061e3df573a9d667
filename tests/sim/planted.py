"""Mistakes planted into the broker, one at a time: the simulator has to find every one.

Each is a patch that lives here only.  `seeds` is the promise: it is found within so many.
A `rare` one is looked for in the heavy tests, and by hand when it needs more than HEAVY seeds;
test_sim_disk.py shows it directly, each day.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from sim import planted_fifo as fifo
from sim import planted_operators as operators
from sim import planted_pop as pop
from sim import planted_retention as retention
from sim import planted_store as store
from sim import planted_tables as tables
from sim import planted_undo as undo

Patch = pytest.MonkeyPatch

HEAVY = 4_000  # seeds; more are run by hand


@dataclass(frozen=True, slots=True)
class Planted:
    name: str
    plant: Callable[[Patch], None]
    seeds: int = 40
    rare: bool = False
    retains: bool = False  # only seeds with retention are counted

    def numbers(self, seeds: int) -> list[int]:
        """Those of the first seeds in which it can show; with retention a run takes long."""
        if self.retains:
            return list(range(3, 3 * seeds + 1, 3))
        return [seed for seed in range(1, seeds + 1) if seed % 3]


PLANTED = [
    Planted("reply before fsync", store.reply_before_fsync),
    Planted("batch handed over by the flusher", store.batch_handed_over_by_the_flusher),
    Planted("dispatch past the confirmed position", store.dispatch_past_the_confirmed_position),
    Planted("crc not checked", store.crc_not_checked, seeds=150),
    Planted("torn tail not cut", store.torn_tail_not_cut, seeds=80),
    Planted("fsync error ignored", store.fsync_error_ignored),
    Planted("fsync retried", store.fsync_retried, seeds=120),
    Planted(
        "index trusted beyond the checkpoint", store.index_trusted_beyond_the_checkpoint, seeds=150
    ),
    Planted("queues not synced before the checkpoint", store.queues_not_synced, seeds=150),
    Planted("checkpoint ahead", store.checkpoint_ahead_of_the_confirmed_position, seeds=300),
    Planted("recovery does not sync", store.recovery_does_not_sync, seeds=300),
    Planted("recovery syncs no names", store.recovery_syncs_no_names, 4000, rare=True),
    Planted("clean pages trusted", store.clean_pages_trusted, seeds=120),
    Planted("torn unit trusted", store.torn_unit_trusted, 10_000, rare=True, retains=True),
    Planted("segments cut from the front", store.segments_cut_from_the_front, 30_000, rare=True),
    Planted("retry token ignored at recovery", tables.token_of_a_retry_ignored_at_recovery),
    Planted("ack not logged", tables.ack_applied_but_not_logged),
    Planted("change keeps the old handle", tables.change_keeps_the_old_handle),
    Planted("queue offset reused", tables.queue_offset_reused_after_a_start),
    Planted("epoch not advanced", tables.epoch_not_advanced),
    Planted("log time goes back", tables.log_time_goes_back, seeds=80),
    Planted("receive before its check point", tables.receive_answered_before_its_check_point),
    Planted("segment name not synced", store.segment_name_not_synced),
    Planted("waiter not woken", tables.waiter_not_woken, seeds=120),
    Planted("waiter looks at the end only", tables.waiter_looks_at_the_end_only, seeds=120),
    Planted("one attempt too many", tables.last_attempt_counted_wrongly),
    Planted("revival written twice", tables.revival_written_twice),
    Planted("snapshot without its tail", store.snapshot_without_its_tail),
    Planted("snapshot without pre-images", tables.snapshot_keeps_no_pre_images),
    Planted("offset commits over a hole", tables.offset_commits_over_a_hole, 400, rare=True),
    Planted("receipts not entered at recovery", tables.receipts_not_entered_at_recovery),
    Planted("receipts not restored", tables.receipts_not_restored),
    Planted("resend stored again", tables.resend_stored_again),
    Planted("flush of the live list", store.flush_of_the_live_list),
    Planted("confirmed by the flusher", store.position_confirmed_by_the_flusher, seeds=150),
    Planted("outcomes not restored", tables.outcomes_not_restored),
    Planted("time read after the append", tables.log_time_read_after_the_append),
    Planted("replayed by the wall clock", tables.replayed_by_the_wall_clock, 80),
    Planted("key index trusts a torn chunk", store.key_index_torn_chunk_trusted, 900, rare=True),
    Planted("key index vouches for the tail", store.key_index_vouches_for_the_tail),
    Planted("key index loses a chunk", store.key_index_chunk_lost),
    Planted("key index finds others", store.key_index_of_all_topics),
    Planted(
        "check point before those in front", pop.check_point_written_before_those_in_front, 150
    ),
    Planted("durable before buffered", pop.durable_check_point_before_the_buffered, 150),
    Planted("buffered ack too early", pop.buffered_ack_answered_before_it_is_durable, 300),
    Planted("ack before its record", pop.ack_answered_before_its_record, 80),
    Planted("acks written too late", pop.acks_written_with_their_group_commit_only, 150),
    Planted("buffered acks not written", pop.buffered_acks_not_written, 150),
    Planted("buffered acks not named", pop.commit_without_the_acks_of_its_check_points, 150),
    Planted("snapshot without the buffer", pop.snapshot_without_the_buffer, 150),
    Planted("next of a key while one is in flight", fifo.next_while_one_is_in_flight),
    Planted("ended message keeps its attempts", fifo.ended_message_keeps_its_attempts),
    Planted("order lost after a start", fifo.order_lost_after_a_start),
    Planted("FIFO attempt not counted", fifo.attempt_not_counted),
    Planted("FIFO retry through the retry topic", fifo.retried_through_the_retry_topic),
    Planted("returned message at the end", fifo.returned_message_goes_to_the_end),
    Planted("snapshot forgets what is over", fifo.snapshot_forgets_what_is_over, 80),
    Planted("snapshot forgets FIFO attempts", fifo.snapshot_forgets_attempts),
    Planted("repeated receive is new", fifo.repeated_receive_is_a_new_one, 160),
    Planted(
        "repeated receive is new after a start", fifo.repeated_receive_is_a_new_one_after_a_start
    ),
    Planted("parked out of order", fifo.parked_messages_in_the_order_of_parking, 150),
    Planted("parked after its record", fifo.parking_time_read_after_the_append, 150),
    Planted("resumed key does not wait", fifo.resumed_key_does_not_wait, 150),
    Planted("snapshot forgets what was said", fifo.snapshot_forgets_what_was_said, 1500, rare=True),
    Planted("given up snapshot mixed in", fifo.given_up_snapshot_is_mixed_in, 1500, rare=True),
    Planted("reset leaves what is parked", fifo.reset_leaves_what_is_parked, 150),
    Planted("reset leaves parked deliveries", fifo.reset_leaves_parked_messages_in_flight, 800),
    Planted("reject written twice", operators.reject_written_twice, 80),
    Planted("reject not done", operators.reject_answered_and_not_done),
    Planted("reset leaves deliveries", operators.reset_leaves_what_is_in_flight),
    Planted("handle accepted after a reset", operators.handle_accepted_after_a_reset, 200),
    Planted("reset forgotten at recovery", operators.reset_forgotten_at_recovery),
    Planted("redriven twice", operators.redriven_twice, 300),
    Planted("snapshot forgets redrives", operators.snapshot_forgets_what_was_redriven, 300),
    Planted("renewed delivery comes back", operators.renewed_delivery_comes_back, 320),
    Planted("silent client keeps", operators.silent_client_keeps_its_deliveries, 150),
    Planted("good-bye ignored", operators.good_bye_ignored, 150),
    Planted("undone attempt counted", undo.undone_attempt_counted),
    Planted("undone FIFO attempt counted", undo.undone_fifo_attempt_counted, 150),
    Planted("last attempt dies unseen", undo.last_attempt_dies_unseen, 150),
    Planted("cancel ignored", undo.cancel_ignored),
    Planted("crossed answer not undone", undo.crossed_answer_not_undone, 150),
    Planted("topic expires too early", retention.topic_expires_too_early, retains=True),
    Planted("downtime is an age", retention.downtime_is_an_age, retains=True),
    Planted("topic keeps its oldest", retention.topic_keeps_its_oldest, retains=True),
    Planted("topic's expiry not counted", retention.expired_by_topic_not_counted, retains=True),
    Planted("live body not moved", retention.live_body_not_moved, retains=True),
    Planted(
        "deleted above the older snapshot", retention.deleted_above_the_older_snapshot, retains=True
    ),
    Planted("minimum not raised", retention.minimum_not_raised_before_the_moves, retains=True),
    Planted(
        "deleted before moves", retention.deleted_before_the_moves_are_confirmed, 80, retains=True
    ),
    Planted(
        "log start not durable", retention.log_start_not_durable_before_the_cut, 150, retains=True
    ),
    Planted("moved record ignored", retention.moved_record_ignored_at_recovery, 80, retains=True),
    Planted("rebuilt from 0", retention.numbers_begin_at_0_in_a_rebuilt_index, 150, retains=True),
    Planted(
        "returned message forgotten by retention",
        retention.what_came_back_is_forgotten_by_the_next_round,
        150,
        retains=True,
    ),
    Planted("parked bodies forgotten", retention.parked_bodies_are_forgotten, 150, retains=True),
    Planted("too early", retention.messages_expire_too_early, retains=True),
]
