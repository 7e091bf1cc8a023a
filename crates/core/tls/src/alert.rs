//! Alerts: how one side reports why it ends the session (RFC 8446, section 6).

use std::io;

/// Level of an alert that is not a failure.
pub(crate) const WARNING: u8 = 1;
/// The sender is done.
pub(crate) const CLOSE_NOTIFY: u8 = 0;
/// Level of an alert that ends the session at once.
pub(crate) const FATAL: u8 = 2;
/// An unexpected message or record.
pub(crate) const UNEXPECTED_MESSAGE: u8 = 10;
/// A record that cannot be authenticated.
pub(crate) const BAD_RECORD_MAC: u8 = 20;
/// A record that is too long.
pub(crate) const RECORD_OVERFLOW: u8 = 22;
/// A message with invalid fields.
pub(crate) const DECODE_ERROR: u8 = 50;
/// The handshake was cancelled; the end follows.
const USER_CANCELED: u8 = 90;

/// Interprets an alert: true for the orderly end of what the peer sends.
///
/// # Errors
/// The peer aborts the session.
pub(crate) fn received(alert: &[u8]) -> io::Result<bool> {
    let why = match alert {
        [_, CLOSE_NOTIFY] => return Ok(true),
        [_, USER_CANCELED] => return Ok(false),
        [_, number] => format!("the other side gave up: TLS alert {number} ({})", name(*number)),
        _ => "the other side sent a malformed TLS alert".to_string(),
    };
    Err(io::Error::new(io::ErrorKind::ConnectionAborted, why))
}

fn name(number: u8) -> &'static str {
    match number {
        10 => "unexpected message",
        20 => "damaged record",
        22 => "record too long",
        40 => "handshake failure",
        42 => "bad certificate",
        43 => "unsupported certificate",
        44 => "certificate revoked",
        45 => "certificate expired",
        46 => "certificate unknown",
        47 => "illegal parameter",
        48 => "unknown certificate authority",
        49 => "access denied",
        50 => "cannot decode",
        51 => "cannot decrypt",
        70 => "protocol version",
        71 => "insufficient security",
        80 => "internal error",
        115 => "unknown user or wrong key",
        116 => "certificate required",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_goodbye_is_an_end() {
        assert!(received(&[1, 0]).unwrap());
        assert!(!received(&[1, 90]).unwrap());
        for bad in [&[2, 20][..], &[2, 255], &[1], &[], &[1, 0, 0]] {
            assert!(received(bad).is_err(), "{bad:?}");
        }
    }
}
