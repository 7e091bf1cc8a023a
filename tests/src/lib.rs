//! Tests against the real peers.
