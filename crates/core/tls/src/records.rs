//! The record layer of TLS 1.3 (RFC 8446, sections 5 and 4.6), with the keys of a finished handshake.
//!
//! OpenSSL's own record layer copies every byte into its own buffer before encryption, and once
//! more for the sender; the same applies to receiving. Here payloads are encrypted from their place
//! directly into the send buffer, and decrypted directly to their destination. All cryptography is
//! OpenSSL's.
//!
//! # Nonces and limits
//! - A nonce is the IV XOR the record's sequence number (section 5.3). `TrafficKeys::begin` alone makes one, and
//!   counts; the count begins at 0 only in `TrafficKeys::derive`, with a key and an IV of a new secret. Thus
//!   no key sees a nonce twice. Each direction has its own secret and its own half, which is used
//!   through `&mut` only.
//! - A record that cannot be sealed as a whole (no room, an error of OpenSSL) has used its sequence
//!   number; the caller gives up the connection, and nothing else is sealed with that number.
//! - Our keys are renewed before more than [`KEY_RECORDS`] records of one seal follow: a seal is at most
//!   `blockhaul_io::SEAL_MAX` bytes, 8 records or so. 2^24 records of 16 KiB are below the 2^24.5 that
//!   section 5.5 allows for AES-GCM; ChaCha20-Poly1305 has no such limit. The count is one of records
//!   with this key, so that the message that announces the new key is counted, too.
//! - A peer that does not renew its keys is followed up to 2^64 records: its own cipher fails before.
//!   A peer that asks for our new keys gets them with our next record; asking again before that has no
//!   further effect, so that a peer cannot make us work without sending.
//! - A record that fails to open ends the connection: there is one attempt to forge for each handshake.
//! - What was decrypted of a record whose tag is wrong is in the caller's buffer, but no length is
//!   returned for it.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use blockhaul_io::{OpenedRecord, SEALED_MAX, StreamOpener, StreamSealer};
use openssl::cipher::{Cipher, CipherRef};
use openssl::cipher_ctx::CipherCtx;
use openssl::error::ErrorStack;
use openssl::md::{Md, MdRef};
use openssl::pkey::Id;
use openssl::pkey_ctx::{HkdfMode, PkeyCtx};

use crate::alert;

/// Length of a record header.
const HEADER: usize = 5;
/// Length of the authentication tag of a record, with every cipher here.
const TAG: usize = 16;
/// Maximum contents of a record.
const PLAIN_MAX: usize = 16 << 10;
/// Maximum records per key: below the limit for AES-GCM (section 5.5), which is 2^24.5.
pub(crate) const KEY_RECORDS: u64 = 1 << 24;
/// Maximum consecutive records without data: more indicates an attack.
const EMPTY_MAX: u32 = 32;
/// Maximum length of a protocol message after the handshake: a session ticket is not longer.
const MESSAGE_MAX: usize = 32 << 10;

const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// A cipher suite of TLS 1.3.
#[derive(Clone, Copy)]
pub(crate) struct TlsCipherSuite {
    cipher: fn() -> &'static CipherRef,
    digest: fn() -> &'static MdRef,
    key_len: usize,
}

impl TlsCipherSuite {
    /// The suite of this name, if it is supported.
    pub(crate) fn named(name: &str) -> Option<TlsCipherSuite> {
        Some(match name {
            "TLS_AES_128_GCM_SHA256" => {
                TlsCipherSuite { cipher: Cipher::aes_128_gcm, digest: Md::sha256, key_len: 16 }
            }
            "TLS_AES_256_GCM_SHA384" => {
                TlsCipherSuite { cipher: Cipher::aes_256_gcm, digest: Md::sha384, key_len: 32 }
            }
            "TLS_CHACHA20_POLY1305_SHA256" => TlsCipherSuite {
                cipher: Cipher::chacha20_poly1305,
                digest: Md::sha256,
                key_len: 32,
            },
            _ => return None,
        })
    }
}

/// Which side the peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerRole {
    Client,
    Server,
}

/// The halves of a session with `peer`: `ours` is the secret for sending, `theirs` the peer's. Our
/// keys are renewed after `limit` records.
pub(crate) fn halves(
    suite: TlsCipherSuite,
    peer: PeerRole,
    ours: Vec<u8>,
    theirs: Vec<u8>,
    limit: u64,
) -> Result<(RecordOpener, RecordSealer), ErrorStack> {
    let received = Arc::new(SealerSignals::default());
    let opener = RecordOpener {
        keys: TrafficKeys::new(suite, theirs, Direction::Open)?,
        peer,
        received: received.clone(),
        message: Vec::new(),
        empty: 0,
    };
    let sealer =
        RecordSealer { keys: TrafficKeys::new(suite, ours, Direction::Seal)?, received, limit };
    Ok((opener, sealer))
}

/// What the receiving half asks the sending half to do.
#[derive(Default)]
struct SealerSignals {
    /// The peer wants us to renew our keys.
    asked: AtomicBool,
    /// The alert for a protocol violation by the peer; `CLOSE_NOTIFY` if there was none.
    alert: AtomicU8,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Open,
    Seal,
}

/// The keys of one direction.
struct TrafficKeys {
    suite: TlsCipherSuite,
    direction: Direction,
    secret: Vec<u8>,
    context: CipherCtx,
    iv: [u8; 12],
    /// Number of records so far with this key.
    sequence: u64,
}

impl TrafficKeys {
    fn new(
        suite: TlsCipherSuite,
        secret: Vec<u8>,
        direction: Direction,
    ) -> Result<TrafficKeys, ErrorStack> {
        let context = CipherCtx::new()?;
        let mut keys = TrafficKeys { suite, direction, secret, context, iv: [0; 12], sequence: 0 };
        keys.derive()?;
        Ok(keys)
    }

    /// Key and nonce of the current secret (section 7.3).
    fn derive(&mut self) -> Result<(), ErrorStack> {
        let mut key = [0; 32];
        let key = &mut key[..self.suite.key_len];
        expand_label(self.suite, &self.secret, "key", key)?;
        expand_label(self.suite, &self.secret, "iv", &mut self.iv)?;
        let cipher = Some((self.suite.cipher)());
        match self.direction {
            Direction::Open => self.context.decrypt_init(cipher, Some(key), Some(&self.iv))?,
            Direction::Seal => self.context.encrypt_init(cipher, Some(key), Some(&self.iv))?,
        }
        self.sequence = 0;
        Ok(())
    }

    /// The next generation of keys (section 7.2).
    fn update(&mut self) -> Result<(), ErrorStack> {
        let mut next = vec![0; self.secret.len()];
        expand_label(self.suite, &self.secret, "traffic upd", &mut next)?;
        self.secret = next;
        self.derive()
    }

    /// Begins a record, whose header is authenticated with it.
    fn begin(&mut self, header: &[u8]) -> Result<(), ErrorStack> {
        let mut nonce = self.iv;
        for (byte, count) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= count;
        }
        match self.direction {
            Direction::Open => self.context.decrypt_init(None, None, Some(&nonce))?,
            Direction::Seal => self.context.encrypt_init(None, None, Some(&nonce))?,
        }
        self.context.cipher_update(header, None)?;
        // Keys are renewed long before 2^64 records; a peer that does not renew fails on its own
        // cipher.
        self.sequence = self.sequence.wrapping_add(1);
        Ok(())
    }

    /// Encrypts or decrypts a part of the record. `into` is as long as `from`.
    fn part(&mut self, from: &[u8], into: &mut [u8]) -> Result<(), ErrorStack> {
        if !from.is_empty() {
            self.context.cipher_update(from, Some(into))?;
        }
        Ok(())
    }
}

/// HKDF-Expand-Label with an empty context (section 7.1).
fn expand_label(
    suite: TlsCipherSuite,
    secret: &[u8],
    label: &str,
    into: &mut [u8],
) -> Result<(), ErrorStack> {
    // Lengths are those of keys: far below the limits of the fields.
    let mut info = vec![0, into.len() as u8, 6 + label.len() as u8];
    info.extend_from_slice(b"tls13 ");
    info.extend_from_slice(label.as_bytes());
    info.push(0);
    let mut context = PkeyCtx::new_id(Id::HKDF)?;
    context.derive_init()?;
    context.set_hkdf_mode(HkdfMode::EXPAND_ONLY)?;
    context.set_hkdf_md((suite.digest)())?;
    context.set_hkdf_key(secret)?;
    context.add_hkdf_info(&info)?;
    context.derive(Some(into))?;
    Ok(())
}

/// The sending half.
pub(crate) struct RecordSealer {
    keys: TrafficKeys,
    received: Arc<SealerSignals>,
    /// Records until the keys are renewed.
    limit: u64,
}

impl RecordSealer {
    /// One record of a part of `plain`, which starts at `from`; returns its length.
    fn record(
        &mut self,
        kind: u8,
        plain: &mut SliceCursor<'_>,
        len: usize,
        sealed: &mut [u8],
    ) -> io::Result<usize> {
        let body = len + 1 + TAG;
        let record = sealed.get_mut(..HEADER + body).ok_or_else(no_room)?;
        // At most 16 KiB and 17 bytes.
        let [high, low] = (body as u16).to_be_bytes();
        let header = [APPLICATION_DATA, 3, 3, high, low];
        record[..HEADER].copy_from_slice(&header);
        self.keys.begin(&header)?;
        let mut at = HEADER;
        let end = HEADER + len;
        while at < end {
            let part = plain.take(end - at);
            if part.is_empty() {
                return Err(no_room());
            }
            self.keys.part(part, &mut record[at..at + part.len()])?;
            at += part.len();
        }
        self.keys.part(&[kind], &mut record[at..=at])?;
        self.keys.context.cipher_final(&mut [])?;
        self.keys.context.tag(&mut record[at + 1..])?;
        Ok(HEADER + body)
    }

    fn message(&mut self, kind: u8, message: &[u8], sealed: &mut [u8]) -> io::Result<usize> {
        let slices = [IoSlice::new(message)];
        self.record(kind, &mut SliceCursor::new(&slices), message.len(), sealed)
    }
}

impl StreamSealer for RecordSealer {
    fn seal(&mut self, plain: &[IoSlice<'_>], sealed: &mut [u8]) -> io::Result<usize> {
        let mut used = 0;
        if self.received.asked.swap(false, Ordering::Relaxed) || self.keys.sequence >= self.limit {
            // Tells the peer that it may keep its keys.
            used += self.message(HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 0], sealed)?;
            self.keys.update()?;
        }
        let mut left: usize = plain.iter().map(|part| part.len()).sum();
        let mut plain = SliceCursor::new(plain);
        while left > 0 {
            let len = left.min(PLAIN_MAX);
            used += self.record(APPLICATION_DATA, &mut plain, len, &mut sealed[used..])?;
            left -= len;
        }
        Ok(used)
    }

    fn close(&mut self, sealed: &mut [u8]) -> io::Result<usize> {
        match self.received.alert.load(Ordering::Relaxed) {
            alert::CLOSE_NOTIFY => {
                self.message(ALERT, &[alert::WARNING, alert::CLOSE_NOTIFY], sealed)
            }
            breach => self.message(ALERT, &[alert::FATAL, breach], sealed),
        }
    }
}

/// Slices, taken from the front.
struct SliceCursor<'a> {
    slices: &'a [IoSlice<'a>],
    taken: usize,
}

impl<'a> SliceCursor<'a> {
    fn new(slices: &'a [IoSlice<'a>]) -> SliceCursor<'a> {
        SliceCursor { slices, taken: 0 }
    }

    /// Up to `most` bytes in one slice; none at the end.
    fn take(&mut self, most: usize) -> &'a [u8] {
        while let Some((first, rest)) = self.slices.split_first() {
            let left: &'a [u8] = &first[self.taken..];
            if left.is_empty() {
                (self.slices, self.taken) = (rest, 0);
                continue;
            }
            let part = &left[..left.len().min(most)];
            self.taken += part.len();
            return part;
        }
        &[]
    }
}

/// The receiving half.
pub(crate) struct RecordOpener {
    keys: TrafficKeys,
    peer: PeerRole,
    received: Arc<SealerSignals>,
    /// The start of a protocol message that continues in the next record.
    message: Vec<u8>,
    /// Number of records without data since the last one with data.
    empty: u32,
}

impl StreamOpener for RecordOpener {
    fn open(
        &mut self,
        sealed: &mut [u8],
        plain: &mut [u8],
        beyond: &mut [u8],
    ) -> io::Result<OpenedRecord> {
        let Some(header) = sealed.first_chunk::<HEADER>() else {
            return Ok(OpenedRecord::default());
        };
        let body = self.body_len(header)?;
        let Some(record) = sealed.get(HEADER..HEADER + body) else {
            return Ok(OpenedRecord::default());
        };
        let used = HEADER + body;
        let (text, tag) = record.split_at(body - TAG);
        let text_len = text.len() - 1;
        let first = text_len.min(plain.len());
        let last = self.decrypt(header, (text, tag), &mut plain[..first], beyond)?;
        let (kind, len) = self.kind_of(last, text_len, (&plain[..first], beyond))?;
        let opened = OpenedRecord { used, len: 0, end: false };
        if kind == APPLICATION_DATA && self.message.is_empty() {
            self.empty = if len > 0 { 0 } else { self.empty + 1 };
            self.check_empty()?;
            return Ok(OpenedRecord { len, ..opened });
        }
        self.empty += 1;
        self.check_empty()?;
        let here = len.min(first);
        let parts = [&plain[..here], &beyond[..len - here]];
        match kind {
            HANDSHAKE => self.messages(parts)?,
            ALERT if self.message.is_empty() => {
                let end = alert::received(&parts.concat())?;
                return Ok(OpenedRecord { end, ..opened });
            }
            _ => {
                let what = "a TLS record that is not expected here";
                return Err(self.breach(alert::UNEXPECTED_MESSAGE, what));
            }
        }
        Ok(opened)
    }
}

impl RecordOpener {
    /// The length of a record's body, by its header.
    #[inline]
    fn body_len(&self, header: &[u8; HEADER]) -> io::Result<usize> {
        let [kind, _, _, high, low] = *header;
        let body = usize::from(u16::from_be_bytes([high, low]));
        if kind != APPLICATION_DATA {
            let what = match kind {
                ALERT | CHANGE_CIPHER_SPEC | HANDSHAKE => "an unprotected TLS record",
                _ => "bytes that are no TLS record",
            };
            return Err(self.breach(alert::UNEXPECTED_MESSAGE, what));
        }
        // All suites add a tag and nothing else: a longer body exceeds the maximum of data and
        // padding together (section 5.4).
        if body > PLAIN_MAX + 1 + TAG {
            return Err(self.breach(alert::RECORD_OVERFLOW, "a TLS record that is too long"));
        }
        if body <= TAG {
            return Err(self.breach(alert::BAD_RECORD_MAC, "a TLS record that is too short"));
        }
        Ok(body)
    }

    /// Decrypts the text of a record into `plain` and what does not fit there into `beyond`, except
    /// for its last byte, which it returns; checks the tag.
    #[inline]
    fn decrypt(
        &mut self,
        header: &[u8; HEADER],
        (text, tag): (&[u8], &[u8]),
        plain: &mut [u8],
        beyond: &mut [u8],
    ) -> io::Result<u8> {
        let (text, last) = text.split_at(text.len() - 1);
        let (first, rest) = text.split_at(plain.len());
        let beyond = beyond.get_mut(..rest.len()).ok_or_else(no_room)?;
        let mut byte = [0];
        self.keys.begin(header)?;
        self.keys.part(first, plain)?;
        self.keys.part(rest, beyond)?;
        self.keys.part(last, &mut byte)?;
        self.keys.context.set_tag(tag)?;
        if self.keys.context.cipher_final(&mut []).is_err() {
            let what = "a TLS record that is forged or damaged";
            return Err(self.breach(alert::BAD_RECORD_MAC, what));
        }
        Ok(byte[0])
    }

    /// The content type of a record, and the length of its content: the type is the last byte,
    /// unless there is padding.
    #[inline]
    fn kind_of(
        &self,
        last: u8,
        mut len: usize,
        (plain, beyond): (&[u8], &[u8]),
    ) -> io::Result<(u8, usize)> {
        let mut kind = last;
        while kind == 0 {
            let Some(left) = len.checked_sub(1) else {
                let what = "a TLS record without a kind";
                return Err(self.breach(alert::UNEXPECTED_MESSAGE, what));
            };
            len = left;
            kind = if len < plain.len() { plain[len] } else { beyond[len - plain.len()] };
        }
        Ok((kind, len))
    }

    /// The peer, or an attacker, violated the protocol. `alert` is sent in the closing message.
    fn breach(&self, alert: u8, what: &str) -> io::Error {
        self.received.alert.store(alert, Ordering::Relaxed);
        io::Error::new(io::ErrorKind::InvalidData, format!("the other side sent {what}"))
    }

    fn check_empty(&self) -> io::Result<()> {
        if self.empty > EMPTY_MAX {
            let what = "TLS records without data for ever";
            Err(self.breach(alert::UNEXPECTED_MESSAGE, what))
        } else {
            Ok(())
        }
    }

    /// Handles messages after the handshake.
    fn messages(&mut self, parts: [&[u8]; 2]) -> io::Result<()> {
        let mut message = std::mem::take(&mut self.message);
        parts.iter().for_each(|part| message.extend_from_slice(part));
        let mut rest = &message[..];
        while let Some(([kind, high, middle, low], body)) = rest.split_first_chunk::<4>() {
            let len = usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low);
            if len > MESSAGE_MAX {
                return Err(self.breach(alert::DECODE_ERROR, "a TLS message that is too long"));
            }
            let Some((body, behind)) = body.split_at_checked(len) else { break };
            match (*kind, body) {
                // Sessions are not resumed: connections are few and long-lived. Only servers send
                // tickets (section 4.6.1).
                (NEW_SESSION_TICKET, _) if self.peer == PeerRole::Server => {}
                (KEY_UPDATE, [request @ (0 | 1)]) if behind.is_empty() => {
                    self.keys.update()?;
                    if *request == 1 {
                        self.received.asked.store(true, Ordering::Relaxed);
                    }
                }
                _ => {
                    let what = "a TLS message that is not expected here";
                    return Err(self.breach(alert::UNEXPECTED_MESSAGE, what));
                }
            }
            rest = behind;
        }
        self.message = rest.to_vec();
        Ok(())
    }
}

/// A caller provided less space than the traits require.
fn no_room() -> io::Error {
    io::Error::other(format!("a TLS record does not fit: {SEALED_MAX} bytes are needed"))
}

#[cfg(test)]
mod differential;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
#[cfg(test)]
mod tests;
