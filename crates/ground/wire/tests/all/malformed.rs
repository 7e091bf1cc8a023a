//! Messages that violate the protocol are refused, with a reason.

// Test helpers may panic like tests.

use blockhaul_wire::option::{
    BlockSizeInfo, InfoItem, InfoRequest, ListEntry, MetaContext, MetaRequest, OptionHeader,
};
use blockhaul_wire::reply::{ChunkKind, ErrorChunk, HoleChunk, ReplyHeader};
use blockhaul_wire::request::{self, StatusFilter};
use blockhaul_wire::status::{ExtentForm, StatusView};
use blockhaul_wire::{ProtocolError, ReplyFlags, ReplyForm, RequestForm, limits, magic};

fn be(parts: &[(u64, usize)]) -> Vec<u8> {
    parts.iter().flat_map(|(value, len)| value.to_be_bytes()[8 - len..].to_vec()).collect()
}

fn chunk(flags: u16, kind: u16, length: u64, extended: bool) -> Vec<u8> {
    let flags = u64::from(flags);
    let kind = u64::from(kind);
    if extended {
        be(&[(magic::EXTENDED_REPLY.into(), 4), (flags, 2), (kind, 2), (7, 8), (0, 8), (length, 8)])
    } else {
        be(&[(magic::STRUCTURED_REPLY.into(), 4), (flags, 2), (kind, 2), (7, 8), (length, 4)])
    }
}

// nbd: request.magic
#[test]
fn wrong_magic_is_told_after_four_bytes() {
    for (bytes, headers) in
        [(magic::EXTENDED_REQUEST, RequestForm::Compact), (magic::REQUEST, RequestForm::Extended)]
    {
        let error = request::RequestHeader::parse(&bytes.to_be_bytes(), headers).unwrap_err();
        assert!(error.to_string().contains("wrong magic"), "{error}");
    }
    // The historic magics that the document forbids.
    for number in [0x1256_0953u32, 0x9674_4668, 0] {
        for replies in [ReplyForm::Simple, ReplyForm::Structured, ReplyForm::Extended] {
            let error = ReplyHeader::parse(&number.to_be_bytes(), replies).unwrap_err();
            assert!(matches!(error, ProtocolError::Magic { .. }), "{error}");
        }
    }
    assert!(matches!(OptionHeader::parse(b"IHAVEOPX"), Err(ProtocolError::Magic { .. })));
}

#[test]
fn replies_of_another_form_are_refused() {
    for (number, replies) in [
        (magic::STRUCTURED_REPLY, ReplyForm::Simple),
        (magic::EXTENDED_REPLY, ReplyForm::Simple),
        (magic::EXTENDED_REPLY, ReplyForm::Structured),
        (magic::SIMPLE_REPLY, ReplyForm::Extended),
        (magic::STRUCTURED_REPLY, ReplyForm::Extended),
    ] {
        let error = ReplyHeader::parse(&number.to_be_bytes(), replies).unwrap_err();
        assert!(matches!(error, ProtocolError::Unexpected { .. }), "{error}");
    }
}

// nbd: chunk.unknown, chunk.none-length, chunk.none-done, chunk.data-length, chunk.hole-length
// nbd: status.length, error.length, error-offset.length, extended.status-length
#[test]
fn chunks_have_the_length_of_their_kind() {
    let bad = [
        (1, magic::REPLY_NONE, 1, "payload"),
        (0, magic::REPLY_NONE, 0, "not the last"),
        (1, magic::REPLY_OFFSET_DATA, 8, "without data"),
        (1, magic::REPLY_OFFSET_DATA, u64::from(limits::PAYLOAD_HARD) + 9, "too long"),
        (1, magic::REPLY_OFFSET_HOLE, 11, "not 12"),
        (1, magic::REPLY_OFFSET_HOLE, 13, "not 12"),
        (1, magic::REPLY_BLOCK_STATUS, 4, "broken list"),
        (1, magic::REPLY_BLOCK_STATUS, 13, "broken list"),
        (1, magic::REPLY_BLOCK_STATUS, 4 + 8 * (limits::EXTENTS as u64 + 1), "too long"),
        (1, magic::REPLY_BLOCK_STATUS_EXT, 8, "broken list"),
        (1, magic::REPLY_BLOCK_STATUS_EXT, 16, "broken list"),
        (1, magic::REPLY_BLOCK_STATUS_EXT, 8 + 16 * (limits::EXTENTS as u64 + 1), "too long"),
        (1, magic::REPLY_ERROR, 5, "too short"),
        (1, magic::REPLY_ERROR, u64::from(limits::ERROR_PAYLOAD) + 1, "too long"),
        (1, magic::REPLY_ERROR_OFFSET, 13, "too short"),
        (1, 0x8003, 5, "too short"),
        (1, 3, 0, "unknown kind"),
        (1, 7, 100, "unknown kind"),
    ];
    for (flags, kind, length, why) in bad {
        for (extended, replies) in [(false, ReplyForm::Structured), (true, ReplyForm::Extended)] {
            let error =
                ReplyHeader::parse(&chunk(flags, kind, length, extended), replies).unwrap_err();
            assert!(error.to_string().contains(why), "{kind:#x} {length}: {error}");
        }
    }
    let huge = chunk(1, magic::REPLY_OFFSET_DATA, u64::MAX, true);
    assert!(ReplyHeader::parse(&huge, ReplyForm::Extended).is_err());
}

// nbd: extended.status-form-checked
#[test]
fn block_status_has_the_form_of_its_headers() {
    for (kind, length, extended) in
        [(magic::REPLY_BLOCK_STATUS, 12, true), (magic::REPLY_BLOCK_STATUS_EXT, 24, false)]
    {
        let replies = |extended| if extended { ReplyForm::Extended } else { ReplyForm::Structured };
        let error = ReplyHeader::parse(&chunk(1, kind, length, extended), replies(extended));
        assert!(error.unwrap_err().to_string().contains("block status of"));
        let fits = ReplyHeader::parse(&chunk(1, kind, length, !extended), replies(!extended));
        assert!(fits.unwrap().is_some());
    }
}

// nbd: reply-flags.unknown, error.unknown
#[test]
fn unknown_flags_and_errors_are_taken() {
    let bytes = chunk(0xfffe, magic::REPLY_OFFSET_DATA, 9, false);
    let (header, _) = ReplyHeader::parse(&bytes, ReplyForm::Structured).unwrap().unwrap();
    let ReplyHeader::Chunk(found) = header else { panic!("{header:?}") };
    assert_eq!(found.flags.unknown(), 0xfffe);
    assert!(!found.is_done() && !found.flags.contains(ReplyFlags::DONE));

    let bytes = chunk(1, 0x8abc, 10, false);
    let (header, _) = ReplyHeader::parse(&bytes, ReplyForm::Structured).unwrap().unwrap();
    let ReplyHeader::Chunk(found) = header else { panic!("{header:?}") };
    assert!(found.kind.is_error());
    let payload = be(&[(22, 4), (2, 2), (0x6869, 2), (0xffff, 2)]);
    let failure = ErrorChunk::parse(found.kind, &payload).unwrap();
    assert_eq!((failure.text(), failure.at), ("hi".to_owned(), None));
}

// nbd: error.nonzero, error-offset.nonzero
#[test]
fn errors_are_checked() {
    for (kind, payload, why) in [
        (ChunkKind::Error, be(&[(22, 4), (1, 2)]), "longer than its payload"),
        (ChunkKind::Error, be(&[(0, 4), (0, 2)]), "is 0"),
        (ChunkKind::Error, be(&[(22, 4), (0, 2), (0, 1)]), "left over"),
        (ChunkKind::ErrorOffset, be(&[(22, 4), (0, 2), (0, 7)]), "too short"),
        (ChunkKind::ErrorOffset, be(&[(22, 4), (0, 2), (0, 8), (0, 1)]), "left over"),
        (ChunkKind::Error, be(&[(22, 4), (0, 1)]), "too short"),
    ] {
        let error = ErrorChunk::parse(kind, &payload).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    let text = be(&[(5, 4), (4, 2), (0x1b5b_324a, 4)]);
    assert_eq!(ErrorChunk::parse(ChunkKind::Error, &text).unwrap().text(), "\\u{1b}[2J");
}

// nbd: chunk.hole-length, chunk.hole-nonzero
#[test]
fn holes_are_checked() {
    assert!(HoleChunk::parse(&be(&[(0, 8), (0, 4)])).is_err());
    assert!(HoleChunk::parse(&be(&[(0, 8), (1, 3)])).is_err());
    assert!(HoleChunk::parse(&be(&[(0, 8), (1, 4), (0, 1)])).is_err());
    assert_eq!(HoleChunk::parse(&be(&[(9, 8), (1, 4)])), Ok(HoleChunk { at: 9, len: 1 }));
}

// nbd: status.length, extended.status-length, extended.status-count
#[test]
fn block_status_is_checked() {
    for (form, payload, why) in [
        (ExtentForm::Bits32, vec![], "shorter"),
        (ExtentForm::Bits32, be(&[(1, 4)]), "no extent"),
        (ExtentForm::Bits32, be(&[(1, 4), (5, 4)]), "inside an extent"),
        (ExtentForm::Bits32, be(&[(1, 4), (0, 4), (0, 4)]), "length 0"),
        (ExtentForm::Bits64, be(&[(1, 4)]), "shorter"),
        (ExtentForm::Bits64, be(&[(1, 4), (0, 4)]), "no extent"),
        (ExtentForm::Bits64, be(&[(1, 4), (2, 4), (1, 8), (0, 8)]), "count"),
        (ExtentForm::Bits64, be(&[(1, 4), (0, 4), (1, 8), (0, 8)]), "count"),
        (ExtentForm::Bits64, be(&[(1, 4), (1, 4), (1, 8)]), "inside an extent"),
        (ExtentForm::Bits64, be(&[(1, 4), (1, 4), (0, 8), (0, 8)]), "length 0"),
        (
            ExtentForm::Bits64,
            be(&[(1, 4), (2, 4), (u64::MAX, 8), (0, 8), (1, 8), (0, 8)]),
            "beyond 64 bits",
        ),
    ] {
        let error = StatusView::parse(form, &payload).unwrap_err();
        assert!(error.to_string().contains(why), "{form:?} {payload:?}: {error}");
    }
    let long = vec![0xff; 4 + 8 * (limits::EXTENTS + 1)];
    assert!(matches!(
        StatusView::parse(ExtentForm::Bits32, &long),
        Err(ProtocolError::TooLong { .. })
    ));
}

// nbd: extended.filter-refused
#[test]
fn filters_are_checked() {
    let negotiated = |id| id < 100;
    for (payload, why) in [
        (be(&[(0, 7)]), "shorter"),
        (be(&[(0, 8)]), "no context"),
        (be(&[(0, 8), (0, 3)]), "inside"),
        (be(&[(0, 8), (1, 4), (1, 4)]), "twice"),
        (be(&[(0, 8), (1, 4), (100, 4)]), "not negotiated"),
    ] {
        let error = StatusFilter::parse(&payload, negotiated).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    let many: Vec<_> = (0..=limits::CONTEXTS as u64).map(|id| (id, 4)).collect();
    let payload = [be(&[(0, 8)]), be(&many)].concat();
    assert!(StatusFilter::parse(&payload, negotiated).is_err());
}

// nbd: string.form, info.name-length, meta.name-utf8
#[test]
fn options_are_checked() {
    for (payload, why) in [
        (be(&[(1, 4)]), "longer"),
        (be(&[(0, 4)]), "number of items"),
        (be(&[(0, 4), (1, 2)]), "differs"),
        (be(&[(0, 4), (0, 2), (0, 2)]), "differs"),
        (be(&[(1, 4), (0, 1), (0, 2)]), "NUL"),
        (be(&[(1, 4), (0xff, 1), (0, 2)]), "UTF-8"),
        (be(&[(u32::MAX.into(), 4), (0, 2)]), "longer"),
    ] {
        let error = InfoRequest::parse(&payload).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    let long = [be(&[(4097, 4)]), vec![b'a'; 4097], be(&[(0, 2)])].concat();
    assert!(matches!(InfoRequest::parse(&long), Err(ProtocolError::TooLong { .. })));

    for (payload, why) in [
        (be(&[(0, 4)]), "number of queries"),
        (be(&[(0, 4), (1, 4)]), "differs"),
        (be(&[(0, 4), (u32::MAX.into(), 4), (0, 8)]), "differs"),
        (be(&[(0, 4), (1, 4), (5, 4), (0, 4)]), "longer"),
        (be(&[(0, 4), (0, 4), (0, 1)]), "left over"),
    ] {
        let error = MetaRequest::parse(&payload).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    let many = limits::QUERIES as u64 + 1;
    let payload = [be(&[(0, 4), (many, 4)]), vec![0; 4 * many as usize]].concat();
    assert!(matches!(MetaRequest::parse(&payload), Err(ProtocolError::TooLong { .. })));
}

// nbd: server-reply.name-length, info.export-length, info.sizes-length
#[test]
fn replies_to_options_are_checked() {
    for payload in [
        vec![],
        be(&[(0, 2), (0, 8), (0, 1)]),
        be(&[(0, 2), (0, 8), (0, 2), (0, 1)]),
        be(&[(3, 2), (1, 4), (512, 4)]),
        be(&[(3, 2), (1, 4), (512, 4), (512, 4), (0, 1)]),
        be(&[(1, 2), (0xff, 1)]),
    ] {
        assert!(InfoItem::parse(&payload).is_err(), "{payload:?}");
    }
    assert!(MetaContext::parse(&[0, 0, 0]).is_err());
    assert!(ListEntry::parse(&be(&[(2, 4), (0x61, 1)])).is_err());
    let entry = ListEntry::parse(&[&be(&[(1, 4)])[..], b"a\x1b[31mred"].concat()).unwrap();
    assert_eq!(entry.description, "\\u{1b}[31mred");
}

// nbd: sizes.minimum, sizes.preferred, sizes.maximum
#[test]
fn block_sizes_have_rules() {
    let valid =
        |minimum, preferred, maximum| BlockSizeInfo { minimum, preferred, maximum }.is_valid();
    assert!(BlockSizeInfo::DEFAULT.is_valid());
    assert!(valid(1, 512, 512) && valid(65536, 65536, u32::MAX) && valid(512, 4096, 5000));
    assert!(!valid(0, 4096, 4096) && !valid(3, 4096, 4096) && !valid(131_072, 131_072, u32::MAX));
    assert!(!valid(1, 256, 4096) && !valid(4096, 512, 4096) && !valid(1, 5000, 8192));
    assert!(!valid(1, 4096, 2048));
}
