//! Our record layer against OpenSSL's and against itself: data, renewed keys, forged records.

use std::io::IoSlice;

use blockhaul_io::{
    OpenedRecord, RECORD_PLAIN_MAX, SEAL_MAX, SEALED_MAX, StreamOpener, StreamSealer,
};
use openssl::ssl::SslVersion;

use super::*;
use crate::handshake::{TlsHandshake, TlsSession};
use crate::{ConnectorConfig, TlsAcceptor, TlsConnector, TlsCredentials};

/// Which record layers two sides use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pair {
    Ours,
    TheirServer,
    TheirClient,
    Old,
}

/// Server and client after a handshake with a key.
fn sessions(pair: Pair) -> (TlsSession, TlsSession) {
    sessions_with(pair, KEY_RECORDS)
}

/// The handshakes of a server and of a client, both complete. `old`: TLS 1.2.
pub(super) fn shaken(old: bool) -> (TlsHandshake, TlsHandshake) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    crate::make::keys(&file, &["alice".to_string()]).unwrap();
    let acceptor = TlsAcceptor::new(&TlsCredentials::Keys(file.clone()), false).unwrap();
    let demands = ConnectorConfig {
        credentials: TlsCredentials::Keys(file),
        user: Some("alice".into()),
        hostname: None,
        verify: true,
    };
    let mut client = TlsConnector::new(&demands).unwrap().begin().unwrap();
    let version = old.then_some(SslVersion::TLS1_2);
    let mut server = acceptor.begin(|ssl| ssl.set_max_proto_version(version)).unwrap();
    for _ in 0..10 {
        let (out, client_done) = client.step();
        server.receive(&out);
        let (out, server_done) = server.step();
        client.receive(&out);
        if client_done.unwrap() && server_done.unwrap() {
            return (server, client);
        }
    }
    panic!("the handshake does not end");
}

/// The same, with our keys lasting for this many records.
fn sessions_with(pair: Pair, limit: u64) -> (TlsSession, TlsSession) {
    let (server, client) = shaken(pair == Pair::Old);
    let server = match pair {
        Pair::TheirServer => server.finish_wrapped(),
        _ => server.finish_with(limit).unwrap(),
    };
    let client = match pair {
        Pair::TheirClient => client.finish_wrapped(),
        _ => client.finish_with(limit).unwrap(),
    };
    assert_eq!(server.about.peer.as_deref(), Some("alice"));
    let version = if pair == Pair::Old { "TLSv1.2" } else { "TLSv1.3" };
    assert_eq!((&*server.about.version, &*client.about.version), (version, version));
    assert!(server.received.is_empty() && client.received.is_empty());
    (server, client)
}

fn sealed(sealer: &mut dyn StreamSealer, parts: &[&[u8]]) -> Vec<u8> {
    let slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut sealed = vec![0; SEALED_MAX];
    let len = sealer.seal(&slices, &mut sealed).unwrap();
    sealed.truncate(len);
    sealed
}

/// Opens everything; each record into `first` bytes, the rest beyond.
fn opened(
    opener: &mut dyn StreamOpener,
    mut sealed: &mut [u8],
    first: usize,
) -> std::io::Result<(Vec<u8>, bool)> {
    let mut all = Vec::new();
    let mut end = false;
    let mut buffer = vec![0xEE; RECORD_PLAIN_MAX];
    while !sealed.is_empty() {
        let (plain, beyond) = buffer.split_at_mut(first);
        let opened = opener.open(sealed, plain, beyond)?;
        assert!(opened.used > 0, "an incomplete record");
        all.extend_from_slice(&buffer[..opened.len]);
        end |= opened.end;
        sealed = &mut sealed[opened.used..];
    }
    Ok((all, end))
}

const PAIRS: [Pair; 4] = [Pair::Ours, Pair::TheirServer, Pair::TheirClient, Pair::Old];

// nbd: tls.version
#[test]
fn what_is_sealed_is_opened_whoever_does_it() {
    let bytes: Vec<u8> = (0..SEAL_MAX as u32).map(|i| (i * 7 + (i >> 8)) as u8).collect();
    for pair in PAIRS {
        let (mut server, mut client) = sessions(pair);
        let parts: [&[&[u8]]; 5] = [
            &[&bytes],
            &[b"x"],
            &[&bytes[..28], &[], &bytes[100..90_000], &bytes[7..8]],
            &[&bytes[..16384]],
            &[&bytes[..16385]],
        ];
        for parts in parts {
            let due = parts.concat();
            for first in [0, 1, 5000, RECORD_PLAIN_MAX] {
                let mut there = sealed(&mut *client.sealer, parts);
                assert!(there.len() > due.len());
                let (plain, _) = opened(&mut *server.opener, &mut there, first).unwrap();
                assert!(plain == due, "{pair:?} to the server");
                let mut back = sealed(&mut *server.sealer, parts);
                let (plain, _) = opened(&mut *client.opener, &mut back, first).unwrap();
                assert!(plain == due, "{pair:?} to the client");
            }
        }
        // The closing message.
        let mut bye = vec![0; SEALED_MAX];
        let len = client.sealer.close(&mut bye).unwrap();
        let (plain, end) = opened(&mut *server.opener, &mut bye[..len], 100).unwrap();
        assert!(plain.is_empty() && end, "{pair:?}");
    }
}

#[test]
fn an_incomplete_record_is_not_touched() {
    for pair in [Pair::Ours, Pair::Old] {
        let (mut server, mut client) = sessions(pair);
        let mut record = sealed(&mut *client.sealer, &[b"hello"]);
        let mut plain = vec![0; RECORD_PLAIN_MAX];
        for len in 0..record.len() {
            let opened = server.opener.open(&mut record[..len], &mut plain, &mut []).unwrap();
            assert_eq!(opened, OpenedRecord::default());
        }
        assert_eq!(opened(&mut *server.opener, &mut record, 3).unwrap().0, b"hello");
    }
}

#[test]
fn forged_repeated_and_foreign_records_end_the_session() {
    for pair in PAIRS {
        let (_, mut client) = sessions(pair);
        let record = sealed(&mut *client.sealer, &[b"hello"]);
        for at in 0..record.len() {
            let (mut server, mut client) = sessions(pair);
            let mut record = sealed(&mut *client.sealer, &[b"hello"]);
            record[at] ^= 1;
            // Another length can only make it incomplete.
            let mut plain = vec![0; RECORD_PLAIN_MAX];
            match server.opener.open(&mut record, &mut plain, &mut []) {
                Ok(opened) => assert!((3..5).contains(&at) && opened.used == 0, "{pair:?} {at}"),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
            if at > 8 && pair != Pair::Ours {
                break;
            }
        }
        let (mut server, mut client) = sessions(pair);
        let mut record = sealed(&mut *client.sealer, &[b"hello"]);
        let mut again = record.clone();
        opened(&mut *server.opener, &mut record, 100).unwrap();
        assert!(opened(&mut *server.opener, &mut again, 100).is_err(), "{pair:?}: repeated");
    }
}

/// Halves with fixed secrets, whose keys last for `limit` records.
fn halves_with(limit: u64) -> (RecordOpener, RecordSealer) {
    let suite = TlsCipherSuite::named("TLS_CHACHA20_POLY1305_SHA256").unwrap();
    let (_, sealer) = halves(suite, PeerRole::Client, vec![1; 32], vec![2; 32], limit).unwrap();
    let (opener, _) = halves(suite, PeerRole::Server, vec![2; 32], vec![1; 32], limit).unwrap();
    (opener, sealer)
}

/// Records changed on the way: what is opened is the beginning of what was sealed. `BLOCKHAUL_SEED`
/// repeats a failure.
#[test]
fn changed_records_never_give_other_bytes() {
    let seed = blockhaul_testkit::rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    let mut rng = blockhaul_testkit::rng::Rng::new(seed);
    let parts: [&[u8]; 4] = [b"a request", &[7; 5000], b"x", &[9; 100]];
    let due = parts.concat();
    let mut plain = vec![0; RECORD_PLAIN_MAX];
    let mut whole = 0;
    for _ in 0..3000 {
        let (mut opener, mut sealer) = halves_with(KEY_RECORDS);
        let mut records: Vec<u8> =
            parts.iter().flat_map(|part| sealed(&mut sealer, &[part])).collect();
        records = blockhaul_testkit::mutate::mutated(&mut rng, &records);
        let mut rest = &mut records[..];
        let mut all = Vec::new();
        while let Ok(opened) = opener.open(rest, &mut plain, &mut []) {
            all.extend_from_slice(&plain[..opened.len]);
            if opened.used == 0 || opened.end {
                break;
            }
            rest = &mut rest[opened.used..];
        }
        assert!(due.starts_with(&all), "{} bytes were opened", all.len());
        whole += usize::from(all == due);
    }
    assert!(whole < 600, "{whole} of 3000 were opened as a whole: too few changes");
}

/// Two sides with fixed secrets: the server's halves, and the client's.
fn both_sides() -> [(RecordOpener, RecordSealer); 2] {
    let suite = TlsCipherSuite::named("TLS_AES_128_GCM_SHA256").unwrap();
    let of_server = vec![1; 32];
    let of_client = vec![2; 32];
    let server = halves(suite, PeerRole::Client, of_server.clone(), of_client.clone(), KEY_RECORDS);
    let client = halves(suite, PeerRole::Server, of_client, of_server, KEY_RECORDS);
    [server.unwrap(), client.unwrap()]
}

/// The alert in a side's closing message: its level and its number.
fn goodbye(sealer: &mut RecordSealer, opener: &mut RecordOpener) -> (u8, u8) {
    let mut bye = vec![0; SEALED_MAX];
    let len = sealer.close(&mut bye).unwrap();
    let mut kind = [0];
    let mut body = [0; 2];
    // As the opener does, which does not return an alert's contents.
    assert_eq!(len, HEADER + 2 + 1 + TAG);
    opener.keys.begin(&bye[..HEADER]).unwrap();
    opener.keys.part(&bye[HEADER..HEADER + 2], &mut body).unwrap();
    opener.keys.part(&bye[HEADER + 2..HEADER + 3], &mut kind).unwrap();
    opener.keys.context.set_tag(&bye[HEADER + 3..len]).unwrap();
    opener.keys.context.cipher_final(&mut []).unwrap();
    assert_eq!(kind, [ALERT]);
    (body[0], body[1])
}

#[test]
fn only_servers_have_tickets() {
    let ticket = [NEW_SESSION_TICKET, 0, 0, 3, 9, 9, 9];
    let [mut server, mut client] = both_sides();
    let mut record = vec![0; SEALED_MAX];
    let len = server.1.message(HANDSHAKE, &ticket, &mut record).unwrap();
    assert_eq!(opened(&mut client.0, &mut record[..len], 100).unwrap().0, b"");
    let len = client.1.message(HANDSHAKE, &ticket, &mut record).unwrap();
    let error = opened(&mut server.0, &mut record[..len], 100).unwrap_err();
    assert!(error.to_string().contains("not expected"), "{error}");
    // What follows the ticket that the client has skipped.
    assert_eq!(goodbye(&mut server.1, &mut client.0), (alert::FATAL, alert::UNEXPECTED_MESSAGE));
}

#[test]
fn padding_does_not_make_records_longer() {
    let mut record = vec![0; SEALED_MAX];
    // Data, its type, padding. The sealer appends the last byte as the type.
    let inner = |data: usize, padding: usize| {
        let mut inner = vec![7; data];
        inner.push(APPLICATION_DATA);
        inner.resize(data + 1 + padding, 0);
        inner.pop();
        inner
    };
    for (data, padding) in [(PLAIN_MAX - 1, 1), (0, PLAIN_MAX), (100, PLAIN_MAX - 100)] {
        let [mut server, mut client] = both_sides();
        let inner = inner(data, padding);
        let len = client.1.message(0, &inner, &mut record).unwrap();
        let (plain, _) = opened(&mut server.0, &mut record[..len], 50).unwrap();
        assert_eq!(plain, vec![7; data], "{data} and {padding}: as long as a record may be");
        assert_eq!(goodbye(&mut server.1, &mut client.0), (alert::WARNING, alert::CLOSE_NOTIFY));
    }
    for (data, padding) in [(PLAIN_MAX, 1), (PLAIN_MAX - 1, 2), (0, PLAIN_MAX + 1), (1, 16623)] {
        let [mut server, mut client] = both_sides();
        let inner = inner(data, padding);
        let len = client.1.message(0, &inner, &mut record).unwrap();
        let error = opened(&mut server.0, &mut record[..len], 50).unwrap_err();
        assert!(error.to_string().contains("too long"), "{data} and {padding}: {error}");
        assert_eq!(goodbye(&mut server.1, &mut client.0), (alert::FATAL, alert::RECORD_OVERFLOW));
    }
}

#[test]
fn a_damaged_record_is_answered_with_its_alert() {
    let [mut server, mut client] = both_sides();
    let mut record = sealed(&mut client.1, &[b"hello"]);
    record[9] ^= 1;
    opened(&mut server.0, &mut record, 100).unwrap_err();
    assert_eq!(goodbye(&mut server.1, &mut client.0), (alert::FATAL, alert::BAD_RECORD_MAC));
}

#[test]
fn keys_are_renewed_after_their_time() {
    let (mut opener, mut sealer) = halves_with(3);
    let secret = sealer.keys.secret.clone();
    for round in 0..20_u8 {
        let mut record = sealed(&mut sealer, &[&[round; 100]]);
        let (plain, _) = opened(&mut opener, &mut record, 100).unwrap();
        assert_eq!(plain, [round; 100]);
    }
    assert_ne!(sealer.keys.secret, secret);
    assert_eq!(sealer.keys.secret, opener.keys.secret);
}

#[test]
fn a_peer_may_ask_for_new_keys() {
    let (mut opener, mut sealer) = halves_with(KEY_RECORDS);
    let mut record = vec![0; SEALED_MAX];
    let len = sealer.message(HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 1], &mut record).unwrap();
    sealer.keys.update().unwrap();
    opened(&mut opener, &mut record[..len], 100).unwrap();
    assert!(opener.received.asked.load(Ordering::Relaxed));
    let mut record = sealed(&mut sealer, &[b"new"]);
    assert_eq!(opened(&mut opener, &mut record, 100).unwrap().0, b"new");
}

#[test]
fn openssl_follows_our_new_keys() {
    for pair in [Pair::TheirServer, Pair::TheirClient] {
        let (server, client) = sessions_with(pair, 2);
        let (mut ours, mut theirs) = match pair {
            Pair::TheirServer => (client, server),
            _ => (server, client),
        };
        let mut lengths = Vec::new();
        for round in 0..10_u8 {
            let mut record = sealed(&mut *ours.sealer, &[&[round; 50]]);
            lengths.push(record.len());
            assert_eq!(opened(&mut *theirs.opener, &mut record, 9).unwrap().0, [round; 50]);
            let mut record = sealed(&mut *theirs.sealer, &[&[round; 50]]);
            assert_eq!(opened(&mut *ours.opener, &mut record, 9).unwrap().0, [round; 50]);
        }
        // Every other seal starts with a key update message.
        assert!(lengths.chunks(2).skip(1).all(|pair| pair[0] > pair[1]), "{lengths:?}");
    }
}

#[test]
fn what_has_no_place_after_a_handshake_is_refused() {
    let cases: [(u8, &[u8]); 9] = [
        (HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 2]),
        (HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 0, KEY_UPDATE, 0, 0, 1, 0]),
        (HANDSHAKE, &[1, 0, 0, 0]),
        (HANDSHAKE, &[NEW_SESSION_TICKET, 1, 0, 0]),
        (CHANGE_CIPHER_SPEC, &[1]),
        (ALERT, &[2, 20]),
        (ALERT, &[1]),
        (24, &[1]),
        (0, &[0, 0, 0]),
    ];
    for (kind, message) in cases {
        let (mut opener, mut sealer) = halves_with(KEY_RECORDS);
        let mut record = vec![0; SEALED_MAX];
        let len = sealer.message(kind, message, &mut record).unwrap();
        let result = opened(&mut opener, &mut record[..len], 100);
        assert!(result.is_err(), "{kind} {message:?}");
    }
    // Tickets are skipped, also in pieces; padding is no data; empty records are limited.
    let (mut opener, mut sealer) = halves_with(KEY_RECORDS);
    let mut record = vec![0; SEALED_MAX];
    for part in [&[NEW_SESSION_TICKET, 0][..], &[0, 3, 9, 9], &[9]] {
        let len = sealer.message(HANDSHAKE, part, &mut record).unwrap();
        assert_eq!(opened(&mut opener, &mut record[..len], 2).unwrap().0, b"");
    }
    let padded = [b'd', APPLICATION_DATA, 0, 0];
    let len = sealer.message(0, &padded, &mut record).unwrap();
    assert_eq!(opened(&mut opener, &mut record[..len], 1).unwrap().0, b"d");
    let end = (0..100).find(|_| {
        let len = sealer.message(APPLICATION_DATA, &[], &mut record).unwrap();
        opened(&mut opener, &mut record[..len], 100).is_err()
    });
    assert_eq!(end, Some(EMPTY_MAX as usize));
}
