//! Every message survives being emitted and parsed, and no prefix of it is accepted as complete.

// Test helpers may panic like tests.

use proptest::collection::{btree_set, vec};
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof,
};
use proptest::proptest;

use blockhaul_wire::option::{
    InfoItem, InfoRequest, MetaRequest, OptionHeader, OptionReplyHeader, ReplyCode,
};
use blockhaul_wire::reply::{self, ChunkKind, ErrorChunk, HoleChunk, ReplyChunk, ReplyEncoder};
use blockhaul_wire::request::{self, StatusFilter};
use blockhaul_wire::status::{
    self, ExtentForm, StatusChunk, StatusExtent, StatusLimits, StatusView,
};
use blockhaul_wire::uri::{TlsParameters, TlsType, Transport, Uri};
use blockhaul_wire::{
    BlockSizeInfo, CommandCode, CommandFlags, Errno, ExportFlags, InfoSet, ListEntry, MetaContext,
    OptionCode, ReplyFlags, ReplyForm, RequestForm,
};

fn request_header() -> impl Strategy<Value = request::RequestHeader> {
    (any::<u16>(), 0u16..12, any::<u64>(), any::<u64>(), any::<u64>()).prop_map(
        |(flags, command, cookie, offset, length)| request::RequestHeader {
            flags: CommandFlags::from_bits(flags),
            command: CommandCode::from_wire(command),
            cookie,
            offset,
            length,
        },
    )
}

fn extents(most: u64) -> impl Strategy<Value = Vec<StatusExtent>> {
    let extent = (1..most, 0..4u64).prop_map(|(len, flags)| StatusExtent { len, flags });
    vec(extent, 1..20)
}

fn chunks() -> impl Strategy<Value = ReplyForm> {
    prop_oneof![Just(ReplyForm::Structured), Just(ReplyForm::Extended)]
}

fn text(most: usize) -> impl Strategy<Value = String> {
    vec(any::<char>().prop_filter("no NUL", |c| *c != '\0'), 0..most)
        .prop_map(|chars| chars.into_iter().collect())
}

fn errno() -> impl Strategy<Value = Errno> {
    (1u32..200).prop_map(|number| Errno::from_wire(number).unwrap())
}

/// Extents with adjacent ones of the same flags joined, as encoders send them.
fn joined(extents: impl IntoIterator<Item = StatusExtent>) -> Vec<StatusExtent> {
    let mut joined: Vec<StatusExtent> = Vec::new();
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
        let headers = if extended { RequestForm::Extended } else { RequestForm::Compact };
        let mut bytes = Vec::new();
        if header.emit(headers, &mut bytes).is_err() {
            prop_assert!(!extended && header.length > u32::MAX.into());
            return Ok(());
        }
        prop_assert_eq!(bytes.len(), headers.len());
        for end in 0..bytes.len() {
            prop_assert_eq!(request::RequestHeader::parse(&bytes[..end], headers), Ok(None));
        }
        bytes.extend(more);
        prop_assert_eq!(
            request::RequestHeader::parse(&bytes, headers),
            Ok(Some((header, headers.len())))
        );
    }

    // nbd: extended.filter-length
    #[test]
    fn filters(length in any::<u64>(), contexts in btree_set(any::<u32>(), 1..64)) {
        let filter = StatusFilter { length, contexts: contexts.iter().copied().collect() };
        let mut bytes = Vec::new();
        filter.emit(&mut bytes);
        prop_assert_eq!(bytes.len() as u64, filter.payload_len());
        prop_assert_eq!(StatusFilter::parse(&bytes, |id| contexts.contains(&id)), Ok(filter));
        let first = *contexts.first().unwrap();
        prop_assert!(StatusFilter::parse(&bytes, |id| id != first).is_err());
    }

    #[test]
    fn simple_replies(cookie in any::<u64>(), number in 0u32..200) {
        let header = reply::ReplyHeader::Simple { cookie, error: Errno::from_wire(number) };
        let bytes = header.encode().unwrap();
        for replies in [ReplyForm::Simple, ReplyForm::Structured] {
            for end in 0..bytes.len() {
                prop_assert_eq!(reply::ReplyHeader::parse(&bytes[..end], replies), Ok(None));
            }
            prop_assert_eq!(reply::ReplyHeader::parse(&bytes, replies), Ok(Some((header, 16))));
        }
        prop_assert!(reply::ReplyHeader::parse(&bytes, ReplyForm::Extended).is_err());
    }

    #[test]
    fn chunk_heads(
        replies in chunks(),
        flags in any::<u16>(),
        cookie in any::<u64>(),
        offset in any::<u64>(),
        units in 1u64..1000,
    ) {
        let answer = ReplyEncoder { replies, cookie, offset };
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
            ReplyForm::Extended => ChunkKind::BlockStatus,
            _ => ChunkKind::BlockStatusExt,
        };
        for (kind, length) in kinds.into_iter().filter(|(kind, _)| *kind != foreign) {
            let chunk: ReplyChunk = answer.chunk(flags, kind, length);
            let bytes = chunk.encode().unwrap();
            prop_assert_eq!(bytes.len(), chunk.header_len());
            for end in 0..bytes.len() {
                prop_assert_eq!(reply::ReplyHeader::parse(&bytes[..end], replies), Ok(None));
            }
            let parsed = reply::ReplyHeader::parse(&bytes, replies);
            prop_assert_eq!(parsed, Ok(Some((reply::ReplyHeader::Chunk(chunk), bytes.len()))));
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
        let answer = ReplyEncoder { replies, cookie, offset };
        let parse = |bytes: &[u8]| match reply::ReplyHeader::parse(bytes, replies).unwrap().unwrap() {
            (reply::ReplyHeader::Chunk(chunk), used) => (chunk, used),
            (simple, _) => panic!("{simple:?}"),
        };

        let bytes = answer.data(ReplyFlags::NONE, at, len).unwrap();
        let (chunk, used) = parse(&bytes);
        prop_assert_eq!(chunk.length, u64::from(len) + 8);
        prop_assert_eq!(reply::data_at(&bytes[used..]), Some(at));
        prop_assert!(!chunk.is_done());

        let hole = HoleChunk { at, len };
        let bytes = answer.hole(ReplyFlags::DONE, hole).unwrap();
        let (chunk, used) = parse(&bytes);
        prop_assert!(chunk.is_done());
        prop_assert_eq!(HoleChunk::parse(&bytes[used..]), Ok(hole));

        let (chunk, _) = parse(&answer.done().unwrap());
        prop_assert_eq!((chunk.kind, chunk.cookie), (ChunkKind::None, cookie));
        prop_assert_eq!(chunk.offset, (replies == ReplyForm::Extended).then_some(offset));
    }

    // nbd: error.length, error-offset.length, error-offset.nonzero
    #[test]
    fn failures(
        replies in chunks(),
        error in errno(),
        text in text(50),
        at in any::<Option<u64>>(),
    ) {
        let failure = ErrorChunk { error, text: text.as_bytes(), at };
        let answer = ReplyEncoder { replies, cookie: 7, offset: 8 };
        let mut bytes = Vec::new();
        answer.error(&failure, &mut bytes);
        let (header, used) = reply::ReplyHeader::parse(&bytes, replies).unwrap().unwrap();
        let reply::ReplyHeader::Chunk(chunk) = header else { panic!("{header:?}") };
        prop_assert!(chunk.is_done() && chunk.kind.is_error());
        prop_assert_eq!(chunk.length as usize, bytes.len() - used);
        prop_assert_eq!(ErrorChunk::parse(chunk.kind, &bytes[used..]), Ok(failure));

        bytes.clear();
        ReplyEncoder { replies: ReplyForm::Simple, ..answer }.error(&failure, &mut bytes);
        let simple = reply::ReplyHeader::Simple { cookie: 7, error: Some(error) };
        prop_assert_eq!(reply::ReplyHeader::parse(&bytes, ReplyForm::Simple), Ok(Some((simple, 16))));
    }

    // nbd: extended.status-only, extended.status-count, extended.status-always
    #[test]
    fn extents_survive(
        replies in chunks(),
        extents in extents(1 << 40),
        context in any::<u32>(),
    ) {
        let sum: u64 = extents.iter().map(|extent| extent.len).sum();
        let answer = ReplyEncoder { replies, cookie: 1, offset: 2 };
        let mut bytes = vec![0xee; 3];
        let chunk = StatusChunk { flags: ReplyFlags::DONE, context, wanted: StatusLimits::new(sum) };
        let encoded =
            status::emit(&answer, chunk, extents.iter().copied(), &mut bytes).unwrap();
        prop_assert_eq!(encoded.covered, sum);
        let (header, used) = reply::ReplyHeader::parse(&bytes[3..], replies).unwrap().unwrap();
        let reply::ReplyHeader::Chunk(chunk) = header else { panic!("{header:?}") };
        let payload = &bytes[3 + used..];
        prop_assert_eq!(chunk.length as usize, payload.len());
        let status = StatusView::parse(ExtentForm::of(chunk.kind).unwrap(), payload).unwrap();
        prop_assert_eq!(status.context(), context);
        prop_assert_eq!(status.len(), encoded.extents);
        if replies == ReplyForm::Extended {
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
        let wanted = StatusLimits { length: part, one, max_extents: most };
        let answer = ReplyEncoder { replies, cookie: 1, offset: 2 };
        let mut bytes = Vec::new();
        let chunk = StatusChunk { flags: ReplyFlags::DONE, context: 0, wanted };
        let encoded =
            status::emit(&answer, chunk, extents.iter().copied(), &mut bytes).unwrap();
        let (header, used) = reply::ReplyHeader::parse(&bytes, replies).unwrap().unwrap();
        let reply::ReplyHeader::Chunk(chunk) = header else { panic!("{header:?}") };
        let status = StatusView::parse(ExtentForm::of(chunk.kind).unwrap(), &bytes[used..]).unwrap();
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
        let wants = InfoSet { name: a, description: b, block_size: c };
        let request = InfoRequest { name: name.clone(), wants };
        request.emit(&mut bytes);
        prop_assert_eq!(InfoRequest::parse(&bytes), Ok(request));

        bytes.clear();
        let request = MetaRequest { export: name.clone(), queries };
        request.emit(&mut bytes);
        prop_assert_eq!(MetaRequest::parse(&bytes), Ok(request));

        bytes.clear();
        let context = MetaContext { id, name: name.clone() };
        context.emit(&mut bytes);
        prop_assert_eq!(MetaContext::parse(&bytes), Ok(context));

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
            InfoItem::Export { size, flags: ExportFlags::from_bits(flags) },
            InfoItem::Name(name),
            InfoItem::Description("a plain text".to_owned()),
            InfoItem::BlockSize(BlockSizeInfo { minimum, preferred, maximum }),
            InfoItem::Other(other),
        ] {
            let mut bytes = Vec::new();
            info.emit(&mut bytes);
            prop_assert_eq!(InfoItem::parse(&bytes), Ok(info));
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
    let answer = |replies| ReplyEncoder { replies, cookie: 9, offset: 512 };
    let simple = reply::ReplyHeader::Simple { cookie: 9, error: None };
    for replies in [ReplyForm::Simple, ReplyForm::Structured] {
        let bytes = answer(replies).success();
        assert_eq!(reply::ReplyHeader::parse(&bytes, replies), Ok(Some((simple, 16))));
    }
    let bytes = answer(ReplyForm::Extended).success();
    let (header, used) = reply::ReplyHeader::parse(&bytes, ReplyForm::Extended).unwrap().unwrap();
    assert_eq!((header.cookie(), used), (9, 32));
    assert_eq!(*answer(ReplyForm::Extended).done().unwrap(), *bytes);
    assert_eq!(answer(ReplyForm::Simple).done(), None);
    assert_eq!(answer(ReplyForm::Simple).hole(ReplyFlags::DONE, HoleChunk { at: 0, len: 1 }), None);
    assert_eq!(
        *answer(ReplyForm::Simple).data(ReplyFlags::DONE, 0, 512).unwrap(),
        *simple.encode().unwrap()
    );
}

// nbd: write.payload
#[test]
fn payloads_follow_writes_and_what_says_so() {
    let header =
        |command, flags| request::RequestHeader { flags, command, cookie: 0, offset: 0, length: 5 };
    let flagged = CommandFlags::PAYLOAD_LEN;
    for headers in [RequestForm::Compact, RequestForm::Extended] {
        assert_eq!(header(CommandCode::Write, CommandFlags::NONE).payload_len(headers), 5);
        assert_eq!(header(CommandCode::Write, flagged).payload_len(headers), 5);
        assert_eq!(header(CommandCode::Trim, CommandFlags::NONE).payload_len(headers), 0);
    }
    assert_eq!(header(CommandCode::BlockStatus, flagged).payload_len(RequestForm::Extended), 5);
    assert_eq!(header(CommandCode::Other(77), flagged).payload_len(RequestForm::Extended), 5);
    assert_eq!(header(CommandCode::BlockStatus, flagged).payload_len(RequestForm::Compact), 0);
}

// nbd: error.message-length
#[test]
fn the_tail_of_an_error_text_is_cut_at_the_bound() {
    // 4096 bytes end inside the last character.
    let text = "é".repeat(2100);
    let text = format!("x{text}");
    let failure = ErrorChunk { text: text.as_bytes(), ..ErrorChunk::new(Errno::Io) };
    let mut bytes = Vec::new();
    failure.emit(&mut bytes);
    let parsed = ErrorChunk::parse(ChunkKind::Error, &bytes).unwrap();
    assert_eq!(parsed.text.len(), 4095);
    assert!(str::from_utf8(parsed.text).is_ok());
    assert!(parsed.text().ends_with("..."));
}

// nbd: meta.structured, meta.fits-flags, status.nonzero, status.last-may-exceed, status.at-most
// nbd: block-status.at-least-one, extended.status-nonzero
#[test]
fn block_status_is_joined_split_and_bounded() {
    let extent = |len, flags| StatusExtent { len, flags };
    let emit = |replies, wanted, extents: &[StatusExtent]| {
        let answer = ReplyEncoder { replies, cookie: 1, offset: 2 };
        let mut out = Vec::new();
        let chunk = StatusChunk { flags: ReplyFlags::DONE, context: 5, wanted };
        let encoded = status::emit(&answer, chunk, extents.iter().copied(), &mut out)?;
        let (header, used) = reply::ReplyHeader::parse(&out, replies)?.unwrap();
        let reply::ReplyHeader::Chunk(chunk) = header else { panic!("{header:?}") };
        let status = StatusView::parse(ExtentForm::of(chunk.kind).unwrap(), &out[used..])?;
        assert_eq!(status.len(), encoded.extents);
        Ok::<_, blockhaul_wire::ProtocolError>(
            status.extents().map(|e| (e.len, e.flags)).collect::<Vec<_>>(),
        )
    };
    let mixed = [extent(0, 9), extent(10, 0), extent(20, 0), extent(0, 3), extent(30, 3)];
    let all = StatusLimits::new(60);
    assert_eq!(emit(ReplyForm::Structured, all, &mixed).unwrap(), [(30, 0), (30, 3)]);
    assert_eq!(emit(ReplyForm::Extended, StatusLimits::new(30), &mixed).unwrap(), [(30, 0)]);
    assert_eq!(
        emit(ReplyForm::Extended, StatusLimits::new(31), &mixed).unwrap(),
        [(30, 0), (30, 3)]
    );
    let one = StatusLimits { one: true, ..StatusLimits::new(15) };
    assert_eq!(emit(ReplyForm::Extended, one, &mixed).unwrap(), [(15, 0)]);

    // Split at a multiple of 64 KiB; only the last piece exceeds the requested range.
    let tib = [extent(1 << 40, 3)];
    let asked = StatusLimits::new(u32::MAX.into());
    assert_eq!(
        emit(ReplyForm::Structured, asked, &tib).unwrap(),
        [(0xffff_0000, 3), (0xffff_0000, 3)]
    );
    assert_eq!(emit(ReplyForm::Extended, asked, &tib).unwrap(), [(1 << 40, 3)]);

    // No more extents than a chunk may have.
    let many: Vec<_> =
        (0..blockhaul_wire::limits::EXTENTS as u64 + 5).map(|i| extent(1, i % 2)).collect();
    let found = emit(ReplyForm::Extended, StatusLimits::new(u64::MAX), &many).unwrap();
    assert_eq!(found.len(), blockhaul_wire::limits::EXTENTS);

    // What cannot be expressed is an error, and leaves nothing behind.
    for (replies, extents) in [
        (ReplyForm::Simple, vec![extent(1, 0)]),
        (ReplyForm::Structured, vec![]),
        (ReplyForm::Extended, vec![extent(0, 0)]),
        (ReplyForm::Structured, vec![extent(1, 1 << 32)]),
    ] {
        let answer = ReplyEncoder { replies, cookie: 1, offset: 2 };
        let mut out = vec![1, 2, 3];
        let chunk = StatusChunk { flags: ReplyFlags::DONE, context: 5, wanted: all };
        assert!(status::emit(&answer, chunk, extents, &mut out).is_err());
        assert_eq!(out, [1, 2, 3]);
    }
}
