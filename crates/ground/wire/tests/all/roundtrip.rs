//! Every message survives being emitted and parsed, and no prefix of it is accepted as complete.

// Test helpers may panic like tests.

use proptest::collection::{btree_set, vec};
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof,
};
use proptest::proptest;

use blockhaul_wire::option::{
    Info, InfoRequest, MetaRequest, OptionHeader, OptionReplyHeader, ReplyCode,
};
use blockhaul_wire::reply::{self, Answer, Chunk, ChunkKind, Failure, Hole};
use blockhaul_wire::request::{self, Filter};
use blockhaul_wire::status::{self, Extent, Form, Status, StatusChunk, Wanted};
use blockhaul_wire::uri::{TlsParameters, TlsType, Transport, Uri};
use blockhaul_wire::{
    BlockSizeInfo, Command, CommandFlags, Context, Errno, ExportFlags, Headers, Infos, ListEntry,
    OptionCode, Replies, ReplyFlags,
};

fn request_header() -> impl Strategy<Value = request::Header> {
    (any::<u16>(), 0u16..12, any::<u64>(), any::<u64>(), any::<u64>()).prop_map(
        |(flags, command, cookie, offset, length)| request::Header {
            flags: CommandFlags::from_bits(flags),
            command: Command::from_wire(command),
            cookie,
            offset,
            length,
        },
    )
}

fn extents(most: u64) -> impl Strategy<Value = Vec<Extent>> {
    let extent = (1..most, 0..4u64).prop_map(|(len, flags)| Extent { len, flags });
    vec(extent, 1..20)
}

fn chunks() -> impl Strategy<Value = Replies> {
    prop_oneof![Just(Replies::Structured), Just(Replies::Extended)]
}

fn text(most: usize) -> impl Strategy<Value = String> {
    vec(any::<char>().prop_filter("no NUL", |c| *c != '\0'), 0..most)
        .prop_map(|chars| chars.into_iter().collect())
}

fn errno() -> impl Strategy<Value = Errno> {
    (1u32..200).prop_map(|number| Errno::from_wire(number).unwrap())
}

/// Extents with adjacent ones of the same flags joined, as encoders send them.
fn joined(extents: impl IntoIterator<Item = Extent>) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::new();
    for extent in extents {
        match joined.last_mut() {
            Some(last) if last.flags == extent.flags => last.len += extent.len,
            _ => joined.push(extent),
        }
    }
    joined
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    // nbd: extended.requests
    #[test]
    fn requests(header in request_header(), extended in any::<bool>(), more in vec(any::<u8>(), 0..9)) {
        let headers = if extended { Headers::Extended } else { Headers::Compact };
        let mut bytes = Vec::new();
        if header.emit(headers, &mut bytes).is_err() {
            prop_assert!(!extended && header.length > u32::MAX.into());
            return Ok(());
        }
        prop_assert_eq!(bytes.len(), headers.len());
        for end in 0..bytes.len() {
            prop_assert_eq!(request::Header::parse(&bytes[..end], headers), Ok(None));
        }
        bytes.extend(more);
        prop_assert_eq!(
            request::Header::parse(&bytes, headers),
            Ok(Some((header, headers.len())))
        );
    }

    // nbd: extended.filter-length
    #[test]
    fn filters(length in any::<u64>(), contexts in btree_set(any::<u32>(), 1..64)) {
        let filter = Filter { length, contexts: contexts.iter().copied().collect() };
        let mut bytes = Vec::new();
        filter.emit(&mut bytes);
        prop_assert_eq!(bytes.len() as u64, filter.payload_len());
        prop_assert_eq!(Filter::parse(&bytes, |id| contexts.contains(&id)), Ok(filter));
        let first = *contexts.first().unwrap();
        prop_assert!(Filter::parse(&bytes, |id| id != first).is_err());
    }

    #[test]
    fn simple_replies(cookie in any::<u64>(), number in 0u32..200) {
        let header = reply::Header::Simple { cookie, error: Errno::from_wire(number) };
        let bytes = header.encode().unwrap();
        for replies in [Replies::Simple, Replies::Structured] {
            for end in 0..bytes.len() {
                prop_assert_eq!(reply::Header::parse(&bytes[..end], replies), Ok(None));
            }
            prop_assert_eq!(reply::Header::parse(&bytes, replies), Ok(Some((header, 16))));
        }
        prop_assert!(reply::Header::parse(&bytes, Replies::Extended).is_err());
    }

    #[test]
    fn chunk_heads(
        replies in chunks(),
        flags in any::<u16>(),
        cookie in any::<u64>(),
        offset in any::<u64>(),
        units in 1u64..1000,
    ) {
        let answer = Answer { replies, cookie, offset };
        let flags = ReplyFlags::from_bits(flags | 1);
        let kinds = [
            (ChunkKind::None, 0),
            (ChunkKind::OffsetData, 8 + units),
            (ChunkKind::OffsetHole, 12),
            (ChunkKind::BlockStatus, 4 + 8 * units),
            (ChunkKind::BlockStatusExt, 8 + 16 * units),
            (ChunkKind::Error, 5 + units),
            (ChunkKind::ErrorOffset, 13 + units),
            (ChunkKind::Other(0x8003), 5 + units),
        ];
        // The other form of block status does not go with these headers.
        let foreign = match replies {
            Replies::Extended => ChunkKind::BlockStatus,
            _ => ChunkKind::BlockStatusExt,
        };
        for (kind, length) in kinds.into_iter().filter(|(kind, _)| *kind != foreign) {
            let chunk: Chunk = answer.chunk(flags, kind, length);
            let bytes = chunk.encode().unwrap();
            prop_assert_eq!(bytes.len(), chunk.header_len());
            for end in 0..bytes.len() {
                prop_assert_eq!(reply::Header::parse(&bytes[..end], replies), Ok(None));
            }
            let parsed = reply::Header::parse(&bytes, replies);
            prop_assert_eq!(parsed, Ok(Some((reply::Header::Chunk(chunk), bytes.len()))));
        }
    }

    // nbd: reply-flags.no-others, extended.all-replies, extended.offset
    #[test]
    fn whole_answers(
        replies in chunks(),
        cookie in any::<u64>(),
        offset in any::<u64>(),
        at in any::<u64>(),
        len in 1u32..1 << 26,
    ) {
        let answer = Answer { replies, cookie, offset };
        let parse = |bytes: &[u8]| match reply::Header::parse(bytes, replies).unwrap().unwrap() {
            (reply::Header::Chunk(chunk), used) => (chunk, used),
            (simple, _) => panic!("{simple:?}"),
        };

        let bytes = answer.data(ReplyFlags::NONE, at, len).unwrap();
        let (chunk, used) = parse(&bytes);
        prop_assert_eq!(chunk.length, u64::from(len) + 8);
        prop_assert_eq!(reply::data_at(&bytes[used..]), Some(at));
        prop_assert!(!chunk.is_done());

        let hole = Hole { at, len };
        let bytes = answer.hole(ReplyFlags::DONE, hole).unwrap();
        let (chunk, used) = parse(&bytes);
        prop_assert!(chunk.is_done());
        prop_assert_eq!(Hole::parse(&bytes[used..]), Ok(hole));

        let (chunk, _) = parse(&answer.done().unwrap());
        prop_assert_eq!((chunk.kind, chunk.cookie), (ChunkKind::None, cookie));
        prop_assert_eq!(chunk.offset, (replies == Replies::Extended).then_some(offset));
    }

    // nbd: error.length, error-offset.length, error-offset.nonzero
    #[test]
    fn failures(
        replies in chunks(),
        error in errno(),
        text in text(50),
        at in any::<Option<u64>>(),
    ) {
        let failure = Failure { error, text: text.as_bytes(), at };
        let answer = Answer { replies, cookie: 7, offset: 8 };
        let mut bytes = Vec::new();
        answer.error(&failure, &mut bytes);
        let (header, used) = reply::Header::parse(&bytes, replies).unwrap().unwrap();
        let reply::Header::Chunk(chunk) = header else { panic!("{header:?}") };
        prop_assert!(chunk.is_done() && chunk.kind.is_error());
        prop_assert_eq!(chunk.length as usize, bytes.len() - used);
        prop_assert_eq!(Failure::parse(chunk.kind, &bytes[used..]), Ok(failure));

        bytes.clear();
        Answer { replies: Replies::Simple, ..answer }.error(&failure, &mut bytes);
        let simple = reply::Header::Simple { cookie: 7, error: Some(error) };
        prop_assert_eq!(reply::Header::parse(&bytes, Replies::Simple), Ok(Some((simple, 16))));
    }

    // nbd: extended.status-only, extended.status-count, extended.status-always
    #[test]
    fn extents_survive(
        replies in chunks(),
        extents in extents(1 << 40),
        context in any::<u32>(),
    ) {
        let sum: u64 = extents.iter().map(|extent| extent.len).sum();
        let answer = Answer { replies, cookie: 1, offset: 2 };
        let mut bytes = vec![0xee; 3];
        let chunk = StatusChunk { flags: ReplyFlags::DONE, context, wanted: Wanted::new(sum) };
        let encoded =
            status::emit(&answer, chunk, extents.iter().copied(), &mut bytes).unwrap();
        prop_assert_eq!(encoded.covered, sum);
        let (header, used) = reply::Header::parse(&bytes[3..], replies).unwrap().unwrap();
        let reply::Header::Chunk(chunk) = header else { panic!("{header:?}") };
        let payload = &bytes[3 + used..];
        prop_assert_eq!(chunk.length as usize, payload.len());
        let status = Status::parse(Form::of(chunk.kind).unwrap(), payload).unwrap();
        prop_assert_eq!(status.context(), context);
        prop_assert_eq!(status.len(), encoded.extents);
        if replies == Replies::Extended {
            prop_assert_eq!(status.len(), joined(extents.iter().copied()).len());
        }
        prop_assert_eq!(joined(status.extents()), joined(extents));
    }

    // nbd: sizes.other-constraints, status.req-one
    /// The rules of "NBD_REPLY_TYPE_BLOCK_STATUS" for a request.
    #[test]
    fn extents_obey_the_request(
        replies in chunks(),
        extents in extents(1 << 34),
        part in 1u64..1 << 36,
        one in any::<bool>(),
        most in 1usize..10,
    ) {
        let sum: u64 = extents.iter().map(|extent| extent.len).sum();
        let wanted = Wanted { length: part, one, max_extents: most };
        let answer = Answer { replies, cookie: 1, offset: 2 };
        let mut bytes = Vec::new();
        let chunk = StatusChunk { flags: ReplyFlags::DONE, context: 0, wanted };
        let encoded =
            status::emit(&answer, chunk, extents.iter().copied(), &mut bytes).unwrap();
        let (header, used) = reply::Header::parse(&bytes, replies).unwrap().unwrap();
        let reply::Header::Chunk(chunk) = header else { panic!("{header:?}") };
        let status = Status::parse(Form::of(chunk.kind).unwrap(), &bytes[used..]).unwrap();
        let lens: Vec<u64> = status.extents().map(|extent| extent.len).collect();
        prop_assert!(lens.len() <= most);
        prop_assert!(lens[..lens.len() - 1].iter().sum::<u64>() < part);
        prop_assert!(encoded.covered <= sum);
        if one {
            prop_assert_eq!(lens.len(), 1);
            prop_assert!(lens[0] <= part);
        } else if lens.len() < most {
            prop_assert!(encoded.covered >= part.min(sum));
        }
        // The reply is true: a prefix of the extents.
        let mut truth = joined(extents).into_iter();
        let mut open = truth.next().unwrap();
        for said in status.extents() {
            if open.len == 0 {
                open = truth.next().unwrap();
            }
            prop_assert_eq!(said.flags, open.flags);
            prop_assert!(said.len <= open.len);
            open.len -= said.len;
        }
    }

    #[test]
    fn option_heads(code in any::<u32>(), reply in any::<u32>(), length in any::<u32>()) {
        let head = OptionHeader { code: OptionCode::from_wire(code), length };
        prop_assert_eq!(OptionHeader::parse(&head.encode()), Ok(Some(head)));
        prop_assert_eq!(OptionHeader::parse(&head.encode()[..15]), Ok(None));
        let (option, code) = (OptionCode::from_wire(code), ReplyCode::from_wire(reply));
        let head = OptionReplyHeader { option, code, length };
        prop_assert_eq!(OptionReplyHeader::parse(&head.encode()), Ok(Some(head)));
        prop_assert_eq!(OptionReplyHeader::parse(&head.encode()[..19]), Ok(None));
    }

    // nbd: info.no-item-twice, server-reply.name-length
    #[test]
    fn option_payloads(
        name in text(20),
        queries in vec(text(20), 0..5),
        (a, b, c) in any::<(bool, bool, bool)>(),
        id in any::<u32>(),
    ) {
        let mut bytes = Vec::new();
        let wants = Infos { name: a, description: b, block_size: c };
        let request = InfoRequest { name: name.clone(), wants };
        request.emit(&mut bytes);
        prop_assert_eq!(InfoRequest::parse(&bytes), Ok(request));

        bytes.clear();
        let request = MetaRequest { export: name.clone(), queries };
        request.emit(&mut bytes);
        prop_assert_eq!(MetaRequest::parse(&bytes), Ok(request));

        bytes.clear();
        let context = Context { id, name: name.clone() };
        context.emit(&mut bytes);
        prop_assert_eq!(Context::parse(&bytes), Ok(context));

        bytes.clear();
        let entry = ListEntry { name, description: "a plain text".to_owned() };
        entry.emit(&mut bytes);
        prop_assert_eq!(ListEntry::parse(&bytes), Ok(entry));
    }

    // nbd: info.export-length, info.text-length, info.sizes-length
    #[test]
    fn information(
        size in any::<u64>(),
        flags in any::<u16>(),
        name in text(20),
        (minimum, preferred, maximum) in any::<(u32, u32, u32)>(),
        other in 4u16..,
    ) {
        for info in [
            Info::Export { size, flags: ExportFlags::from_bits(flags) },
            Info::Name(name),
            Info::Description("a plain text".to_owned()),
            Info::BlockSize(BlockSizeInfo { minimum, preferred, maximum }),
            Info::Other(other),
        ] {
            let mut bytes = Vec::new();
            info.emit(&mut bytes);
            prop_assert_eq!(Info::parse(&bytes), Ok(info));
        }
    }

    #[test]
    fn uris(
        export in text(30),
        transport in prop_oneof![
            ("[a-z0-9.-]{1,20}", 1u16..).prop_map(|(host, port)| Transport::Tcp { host, port }),
            (any::<std::net::Ipv6Addr>(), 1u16..)
                .prop_map(|(host, port)| Transport::Tcp { host: host.to_string(), port }),
            vec(1u8.., 1..40).prop_map(|socket| Transport::Unix { socket }),
            any::<(u32, u32)>().prop_map(|(cid, port)| Transport::Vsock { cid, port }),
        ],
        tls in proptest::option::of((
            proptest::option::of(text(9)), proptest::option::of(text(9)), any::<Option<bool>>(),
        )),
    ) {
        let tls = tls.map(|(username, certificates, verify_peer)| TlsParameters {
            psk_file: certificates.clone(),
            hostname: username.clone(),
            username, certificates, verify_peer,
            kind: verify_peer.map(|psk| if psk { TlsType::Psk } else { TlsType::X509 }),
        });
        let uri = Uri { transport, export, tls };
        let text = uri.to_string();
        prop_assert!(text.is_ascii());
        prop_assert_eq!(Uri::parse(&text), Ok(uri));
        // Case does not matter in the scheme.
        let (scheme, rest) = text.split_once(':').unwrap();
        let shouted = format!("{}:{rest}", scheme.to_uppercase());
        prop_assert_eq!(Uri::parse(&shouted).unwrap().to_string(), text);
    }
}

// nbd: transmission.simple-only, simple.only-without-payload, structured.needs-negotiation
// nbd: reply-flags.done-none, chunk.none-length, chunk.none-done, read.reply-form
// nbd: extended.no-simple
#[test]
fn success_has_the_form_that_was_negotiated() {
    let answer = |replies| Answer { replies, cookie: 9, offset: 512 };
    let simple = reply::Header::Simple { cookie: 9, error: None };
    for replies in [Replies::Simple, Replies::Structured] {
        let bytes = answer(replies).success();
        assert_eq!(reply::Header::parse(&bytes, replies), Ok(Some((simple, 16))));
    }
    let bytes = answer(Replies::Extended).success();
    let (header, used) = reply::Header::parse(&bytes, Replies::Extended).unwrap().unwrap();
    assert_eq!((header.cookie(), used), (9, 32));
    assert_eq!(*answer(Replies::Extended).done().unwrap(), *bytes);
    assert_eq!(answer(Replies::Simple).done(), None);
    assert_eq!(answer(Replies::Simple).hole(ReplyFlags::DONE, Hole { at: 0, len: 1 }), None);
    assert_eq!(
        *answer(Replies::Simple).data(ReplyFlags::DONE, 0, 512).unwrap(),
        *simple.encode().unwrap()
    );
}

// nbd: write.payload
#[test]
fn payloads_follow_writes_and_what_says_so() {
    let header =
        |command, flags| request::Header { flags, command, cookie: 0, offset: 0, length: 5 };
    let flagged = CommandFlags::PAYLOAD_LEN;
    for headers in [Headers::Compact, Headers::Extended] {
        assert_eq!(header(Command::Write, CommandFlags::NONE).payload_len(headers), 5);
        assert_eq!(header(Command::Write, flagged).payload_len(headers), 5);
        assert_eq!(header(Command::Trim, CommandFlags::NONE).payload_len(headers), 0);
    }
    assert_eq!(header(Command::BlockStatus, flagged).payload_len(Headers::Extended), 5);
    assert_eq!(header(Command::Other(77), flagged).payload_len(Headers::Extended), 5);
    assert_eq!(header(Command::BlockStatus, flagged).payload_len(Headers::Compact), 0);
}

// nbd: error.message-length
#[test]
fn the_tail_of_an_error_text_is_cut_at_the_bound() {
    // 4096 bytes end inside the last character.
    let text = "é".repeat(2100);
    let text = format!("x{text}");
    let failure = Failure { text: text.as_bytes(), ..Failure::new(Errno::Io) };
    let mut bytes = Vec::new();
    failure.emit(&mut bytes);
    let parsed = Failure::parse(ChunkKind::Error, &bytes).unwrap();
    assert_eq!(parsed.text.len(), 4095);
    assert!(str::from_utf8(parsed.text).is_ok());
    assert!(parsed.text().ends_with("..."));
}

// nbd: meta.structured, meta.fits-flags, status.nonzero, status.last-may-exceed, status.at-most
// nbd: block-status.at-least-one, extended.status-nonzero
#[test]
fn block_status_is_joined_split_and_bounded() {
    let extent = |len, flags| Extent { len, flags };
    let emit = |replies, wanted, extents: &[Extent]| {
        let answer = Answer { replies, cookie: 1, offset: 2 };
        let mut out = Vec::new();
        let chunk = StatusChunk { flags: ReplyFlags::DONE, context: 5, wanted };
        let encoded = status::emit(&answer, chunk, extents.iter().copied(), &mut out)?;
        let (header, used) = reply::Header::parse(&out, replies)?.unwrap();
        let reply::Header::Chunk(chunk) = header else { panic!("{header:?}") };
        let status = Status::parse(Form::of(chunk.kind).unwrap(), &out[used..])?;
        assert_eq!(status.len(), encoded.extents);
        Ok::<_, blockhaul_wire::Error>(
            status.extents().map(|e| (e.len, e.flags)).collect::<Vec<_>>(),
        )
    };
    let mixed = [extent(0, 9), extent(10, 0), extent(20, 0), extent(0, 3), extent(30, 3)];
    let all = Wanted::new(60);
    assert_eq!(emit(Replies::Structured, all, &mixed).unwrap(), [(30, 0), (30, 3)]);
    assert_eq!(emit(Replies::Extended, Wanted::new(30), &mixed).unwrap(), [(30, 0)]);
    assert_eq!(emit(Replies::Extended, Wanted::new(31), &mixed).unwrap(), [(30, 0), (30, 3)]);
    let one = Wanted { one: true, ..Wanted::new(15) };
    assert_eq!(emit(Replies::Extended, one, &mixed).unwrap(), [(15, 0)]);

    // Split at a multiple of 64 KiB; only the last piece exceeds the requested range.
    let tib = [extent(1 << 40, 3)];
    let asked = Wanted::new(u32::MAX.into());
    assert_eq!(
        emit(Replies::Structured, asked, &tib).unwrap(),
        [(0xffff_0000, 3), (0xffff_0000, 3)]
    );
    assert_eq!(emit(Replies::Extended, asked, &tib).unwrap(), [(1 << 40, 3)]);

    // No more extents than a chunk may have.
    let many: Vec<_> =
        (0..blockhaul_wire::limits::EXTENTS as u64 + 5).map(|i| extent(1, i % 2)).collect();
    let found = emit(Replies::Extended, Wanted::new(u64::MAX), &many).unwrap();
    assert_eq!(found.len(), blockhaul_wire::limits::EXTENTS);

    // What cannot be expressed is an error, and leaves nothing behind.
    for (replies, extents) in [
        (Replies::Simple, vec![extent(1, 0)]),
        (Replies::Structured, vec![]),
        (Replies::Extended, vec![extent(0, 0)]),
        (Replies::Structured, vec![extent(1, 1 << 32)]),
    ] {
        let answer = Answer { replies, cookie: 1, offset: 2 };
        let mut out = vec![1, 2, 3];
        let chunk = StatusChunk { flags: ReplyFlags::DONE, context: 5, wanted: all };
        assert!(status::emit(&answer, chunk, extents, &mut out).is_err());
        assert_eq!(out, [1, 2, 3]);
    }
}
