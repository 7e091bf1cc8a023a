//! The model of what a client may read.

use blockhaul_simulator::oracle::{Oracle, SECTOR, ZEROES, bytes_of, value_of};

#[test]
fn values_and_bytes_belong_together_and_misplaced_sectors_are_found() {
    for value in [ZEROES, 1, 7 << 32] {
        let bytes = bytes_of(3..5, value);
        assert_eq!(value_of(3, &bytes[..SECTOR]), Some(value));
        assert_eq!(value_of(4, &bytes[SECTOR..]), Some(value));
        assert_eq!(value_of(3, &bytes[SECTOR..]) == Some(value), value == ZEROES);
    }
    let mut torn = bytes_of(3..4, 9);
    torn[100] ^= 1;
    assert_eq!(value_of(3, &torn), None);
}

#[test]
fn a_dropped_cache_may_write_after_the_server_has_come_back() {
    let mut oracle = Oracle::new(8, 2);
    let value = oracle.fresh();
    oracle.begin(8..9, value);
    oracle.failed(8..9, true);
    oracle.forget_late();
    assert!(oracle.is_settled(8..9), "its request has ended with the server");
    oracle.lost_cache();
    oracle.forget_late();
    assert!(!oracle.is_settled(8..10));
}

#[test]
fn a_reply_of_a_server_that_has_ended_may_be_from_before_a_late_write() {
    let mut oracle = Oracle::new(8, 1);
    let value = oracle.fresh();
    oracle.begin(8..9, value);
    oracle.failed(8..9, true);
    let before = oracle.begun();
    // The server reads, writes, and ends.
    oracle.forget_late();
    assert!(oracle.check(8..9, &bytes_of(8..9, 1), before).is_ok());
    let now = oracle.begun();
    assert!(oracle.check(8..9, &bytes_of(8..9, value), now).is_ok(), "the write came later");
    assert!(oracle.check(8..9, &bytes_of(8..9, 1), now).is_err(), "the next server has read it");
}

#[test]
fn what_was_flushed_must_be_there_and_what_was_not_may() {
    let mut oracle = Oracle::new(8, 2);
    let value = oracle.fresh();
    let first = oracle.begun();
    oracle.begin(8..9, value);
    oracle.done(8..9, value, false, first);
    let old = bytes_of(8..9, 1);
    assert!(oracle.check(8..9, &old, first).is_err(), "it was acknowledged");
    let flushing = oracle.flush();
    oracle.power_cut();
    let second = oracle.begun();
    assert!(oracle.check(8..9, &old, second).is_ok(), "it was not flushed");
    assert!(oracle.flushed(&flushing).is_err(), "it is lost");
    let value = oracle.fresh();
    oracle.begin(9..10, value);
    oracle.done(9..10, value, true, second);
    oracle.power_cut();
    let third = oracle.begun();
    assert!(oracle.check(9..10, &bytes_of(9..10, 1), third).is_err(), "it was durable");
    assert!(oracle.check_zero(9..10, third).is_err());
}

#[test]
fn a_read_from_before_a_flush_may_return_what_the_flush_has_replaced() {
    let mut oracle = Oracle::new(8, 1);
    let (old, begun) = (bytes_of(8..9, 1), oracle.begun());
    let value = oracle.fresh();
    oracle.begin(8..9, value);
    oracle.done(8..9, value, false, begun);
    // The client drops the cache that has the write. Its flush still ends.
    let flushing = oracle.flush();
    oracle.lost_cache();
    let before = oracle.begun();
    assert!(oracle.flushed(&flushing).is_ok());
    let after = oracle.begun();
    assert!(oracle.check(8..9, &old, before).is_ok(), "it was answered before the flush");
    assert!(oracle.check(8..9, &old, after).is_err(), "the flush has written it");
    assert!(oracle.check(8..9, &bytes_of(8..9, value), before).is_ok());
    assert!(oracle.check_zero(8..9, before).is_err(), "it never had zeroes");
}
