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
    let before = oracle.losses();
    // The server reads, writes, and ends.
    oracle.forget_late();
    assert!(oracle.check(8..9, &bytes_of(8..9, 1), before).is_ok());
    let now = oracle.losses();
    assert!(oracle.check(8..9, &bytes_of(8..9, value), now).is_ok(), "the write came later");
    assert!(oracle.check(8..9, &bytes_of(8..9, 1), now).is_err(), "the next server has read it");
}

#[test]
fn what_was_flushed_must_be_there_and_what_was_not_may() {
    let mut oracle = Oracle::new(8, 2);
    let value = oracle.fresh();
    oracle.begin(8..9, value);
    oracle.done(8..9, value, false, 0);
    let old = bytes_of(8..9, 1);
    assert!(oracle.check(8..9, &old, 0).is_err(), "it was acknowledged");
    let flushing = oracle.flush();
    oracle.power_cut();
    assert!(oracle.check(8..9, &old, 1).is_ok(), "it was not flushed");
    assert!(oracle.flushed(&flushing).is_err(), "it is lost");
    let value = oracle.fresh();
    oracle.begin(9..10, value);
    oracle.done(9..10, value, true, 1);
    oracle.power_cut();
    assert!(oracle.check(9..10, &bytes_of(9..10, 1), 2).is_err(), "it was durable");
    assert!(oracle.check_zero(9..10).is_err());
}
