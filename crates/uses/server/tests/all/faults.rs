//! Clients that violate the protocol, or use it in unusual ways: each gets the reply that the
//! document requires, and no other client is affected.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{EINVAL, EIO, ENOSPC, ENOTSUP, EPERM, FORMS, Fixture, content, device, serve};
use blockhaul_block::{Kind, OpKind};
use blockhaul_server::Limits;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::until;
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, CommandFlags, ReplyForm, magic};

const SIZE: u64 = 1 << 20;

fn model() -> Arc<ModelDevice> {
    device(SIZE, CompletionOrder::Deferred)
}

fn fixture() -> Fixture {
    serve(model(), Limits::default())
}

// nbd: request.magic
#[test]
fn garbage_ends_the_connection() {
    let fixture = fixture();
    for seed in 1..9 {
        // Bytes that happen to start a large option or payload only make the server wait.
        let mut client = fixture.connect();
        let _ = client.send_garbage(seed, 4096);
        client.shut();
        client.expect_close().unwrap();
        let mut client = fixture.connect();
        client.hello(3).unwrap();
        let _ = client.send_garbage(seed, 4096);
        client.expect_close().unwrap();
        for replies in FORMS {
            let mut client = fixture.client(replies);
            let _ = client.send_garbage(seed, 4096);
            assert_eq!(client.expect_close().unwrap(), 0, "there is nothing to answer");
        }
    }
    fixture.is_well();
    fixture.wait_for_open(0);
}

// nbd: handshake.unknown-client-flags
#[test]
fn unknown_handshake_flags_end_the_connection() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.hello(0xff00).unwrap();
    client.expect_close().unwrap();
    fixture.is_well();
}

#[test]
fn silent_clients_are_sent_away() {
    let limits = |handshake| Limits { handshake, ..Limits::default() };
    let crowd = |fixture: &Fixture| (0..20).map(|_| fixture.connect()).collect::<Vec<_>>();
    // Others are served meanwhile.
    let fixture = serve(model(), limits(Duration::from_secs(3600)));
    let silent = crowd(&fixture);
    fixture.is_well();
    assert!(fixture.server.open() >= silent.len());
    let fixture = serve(model(), limits(Duration::from_millis(300)));
    let mut silent = crowd(&fixture);
    let mut slow = fixture.connect();
    // Sending a byte now and then does not extend the time.
    let trickle = slow.send_slowly(&[0; 1000], 1, Duration::from_millis(20));
    assert!(trickle.is_err());
    for client in &mut silent {
        client.expect_close().unwrap();
    }
    fixture.wait_for_open(0);
}

#[test]
fn a_flood_of_options_ends_the_connection() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.hello(3).unwrap();
    let mut list = magic::IHAVEOPT.to_be_bytes().to_vec();
    list.extend_from_slice(&magic::OPT_LIST.to_be_bytes());
    list.extend_from_slice(&[0; 4]);
    // The server may disconnect in between.
    let _ = client.send(&list.repeat(5000));
    let answered = client.expect_close().unwrap();
    assert!(answered < 100_000, "{answered} bytes of answers");
    fixture.is_well();
}

#[test]
fn long_options_are_skipped_or_end_the_connection() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.hello(3).unwrap();
    let replies = client.option(magic::OPT_LIST, &vec![0; 500_000]).unwrap();
    assert!(replies[0].is_error());
    client.go("").unwrap();
    assert_eq!(client.read(0, 100).unwrap(), content(0, 100));
    let mut client = fixture.connect();
    client.hello(3).unwrap();
    let head = [magic::OPT_GO.to_be_bytes(), u32::MAX.to_be_bytes()].concat();
    client.send(&[&magic::IHAVEOPT.to_be_bytes()[..], &head].concat()).unwrap();
    client.expect_close().unwrap();
    fixture.is_well();
}

// nbd: abort.no-hard-disconnect
#[test]
fn an_unknown_export_is_refused_and_another_may_be_chosen() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.hello(3).unwrap();
    let refusal = client.go("nothing").unwrap_err();
    assert!(refusal.contains("there is no export"), "{refusal}");
    assert_eq!(client.go("").unwrap().size, SIZE);
    assert_eq!(client.read(0, 100).unwrap(), content(0, 100));
}

// nbd: abort.hard-if-needed
#[test]
fn answers_before_a_name_that_cannot_be_refused_are_heard() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.hello(3).unwrap();
    // In one send: the server has already made the first reply when it reads the name.
    let option = |code: u32, payload: &[u8]| {
        let head = [code.to_be_bytes(), (payload.len() as u32).to_be_bytes()].concat();
        [&magic::IHAVEOPT.to_be_bytes()[..], &head, payload].concat()
    };
    let structured = option(magic::OPT_STRUCTURED_REPLY, &[]);
    client.send(&[structured, option(magic::OPT_EXPORT_NAME, b"nothing")].concat()).unwrap();
    let reply = client.receive_option_reply(magic::OPT_STRUCTURED_REPLY).unwrap();
    assert_eq!(reply.kind, magic::REP_ACK);
    assert_eq!(client.expect_close().unwrap(), 0);
    fixture.is_well();
}

/// A request, its payload, and the error that it gets.
struct Odd {
    command: CommandCode,
    flags: CommandFlags,
    at: u64,
    len: u64,
    payload: usize,
    error: u32,
}

fn odd(command: CommandCode, flags: CommandFlags, at: u64, len: u64, error: u32) -> Odd {
    let payload = if command == CommandCode::Write { len as usize } else { 0 };
    Odd { command, flags, at, len, payload, error }
}

fn ask(client: &mut Conversation, odd: &Odd) -> blockhaul_testkit::peer::PeerReply {
    let mut request = client.request(odd.command, odd.at, odd.len);
    request.flags |= odd.flags;
    client.ask(&request, &vec![7; odd.payload]).unwrap()
}

// nbd: transmission.simple-only, structured.no-simple-read, structured.error-text
// nbd: meta.server-einval, command-flags.unknown, chunk.data-length, chunk.hole-nonzero
// nbd: read.simple-error, read.chunk-nonempty, write.enospc, cache.no-effect
// nbd: errors.einval-unknown, extended.all-replies
#[test]
fn odd_requests_are_answered_and_the_connection_goes_on() {
    use CommandCode::{BlockStatus, Cache, Flush, Other, Read, Trim, Write, WriteZeroes};
    let fixture = fixture();
    let none = CommandFlags::NONE;
    let mut common = vec![
        odd(Other(99), none, 0, 512, EINVAL),
        odd(Other(8), none, 0, 512, EINVAL),
        odd(Read, CommandFlags::from_bits(0x8000), 0, 512, EINVAL),
        odd(Read, CommandFlags::NO_HOLE, 0, 512, EINVAL),
        odd(Write, CommandFlags::from_bits(0x100), 0, 512, EINVAL),
        odd(Trim, CommandFlags::REQ_ONE, 0, 512, EINVAL),
        odd(Flush, none, 12345, 678, 0),
        odd(Flush, CommandFlags::FUA, 0, 0, 0),
        odd(Cache, CommandFlags::FUA, 0, 512, 0),
        odd(Write, none, SIZE - 511, 512, ENOSPC),
        odd(Write, none, u64::MAX, 512, ENOSPC),
        odd(WriteZeroes, none, SIZE, 1, ENOSPC),
        odd(Trim, none, u64::MAX - 5, 4096, EINVAL),
        odd(Read, none, SIZE - 511, 512, EINVAL),
        odd(Read, none, u64::MAX, 1, EINVAL),
        odd(Cache, none, SIZE, 1, EINVAL),
        odd(Read, none, 0, (32 << 20) + 1, EINVAL),
        odd(Read, none, 0, u64::from(u32::MAX), EINVAL),
        odd(BlockStatus, none, 0, 512, EINVAL),
        odd(Write, none, 0, 33 << 20, EINVAL),
    ];
    for command in [Read, Write, WriteZeroes, Trim, Cache] {
        common.push(odd(command, none, 512, 0, EINVAL));
    }
    for replies in FORMS {
        let mut client = fixture.client(replies);
        let df = if replies == ReplyForm::Simple { EINVAL } else { 0 };
        let odd_df = odd(Read, CommandFlags::DF, 0, 512, df);
        for odd in common.iter().chain([&odd_df]) {
            let answer = ask(&mut client, odd);
            let what = format!("{replies:?} {:?} {:#x} at {}", odd.command, odd.len, odd.at);
            assert_eq!(answer.error, odd.error, "{what}: {}", answer.text);
            if odd.error != 0 && replies != ReplyForm::Simple {
                assert!(!answer.text.is_empty(), "{what}: an explanation");
            }
        }
        assert_eq!(client.read(1, 5000).unwrap(), content(1, 5000), "nothing has changed");
    }
    fixture.is_well();
}

// nbd: read.split, block-status.einval
#[test]
fn lengths_above_32_bits_are_answered() {
    let fixture = fixture();
    let (mut client, _) = fixture.client_with_contexts(ReplyForm::Extended, &["base:allocation"]);
    let none = CommandFlags::NONE;
    for odd in [
        odd(CommandCode::Read, none, 0, 1 << 63, EINVAL),
        odd(CommandCode::WriteZeroes, none, 0, 1 << 63, ENOSPC),
        odd(CommandCode::Trim, none, 1, u64::MAX, EINVAL),
        odd(CommandCode::Cache, none, 4096, u64::MAX - 4095, EINVAL),
        odd(CommandCode::BlockStatus, none, 4096, u64::MAX, EINVAL),
    ] {
        assert_eq!(ask(&mut client, &odd).error, odd.error);
    }
    assert_eq!(client.read(0, 100).unwrap(), content(0, 100));
}

// nbd: extended.too-long
#[test]
fn writes_too_long_to_be_skipped_end_the_connection() {
    let fixture = fixture();
    for replies in FORMS {
        let mut lengths = vec![65 << 20, u64::from(u32::MAX)];
        if replies == ReplyForm::Extended {
            lengths.extend([1 << 32, 1 << 63, u64::MAX]);
        }
        for length in lengths {
            let mut client = fixture.client(replies);
            let request = client.request(CommandCode::Write, 0, length);
            client.send_request(&request, &[]).unwrap();
            assert_eq!(client.expect_close().unwrap(), 0);
        }
    }
    fixture.is_well();
    assert!(fixture.pool.peak() <= 1 << 20, "nothing was reserved for them");
}

// nbd: extended.skip-payload
#[test]
fn payloads_without_a_meaning_are_dropped() {
    let fixture = fixture();
    let payload = CommandFlags::PAYLOAD_LEN;
    let (mut client, _) = fixture.client_with_contexts(ReplyForm::Extended, &["base:allocation"]);
    for command in [
        CommandCode::Read,
        CommandCode::Trim,
        CommandCode::WriteZeroes,
        CommandCode::Flush,
        CommandCode::Cache,
        CommandCode::Other(77),
    ] {
        for len in [0, 1, 1000, 200_000] {
            let mut odd = odd(command, payload, 0, len, EINVAL);
            odd.payload = len as usize;
            assert_eq!(ask(&mut client, &odd).error, EINVAL, "{command:?} {len}");
        }
        assert_eq!(client.read(0, 100).unwrap(), content(0, 100));
    }
    let request = client.request(CommandCode::Trim, 0, 1 << 40);
    let request = RequestHeader { flags: payload, ..request };
    client.send_request(&request, &[]).unwrap();
    assert_eq!(client.expect_close().unwrap(), 0);
    // Without extended headers the flag is unknown, and no payload follows.
    for replies in [ReplyForm::Simple, ReplyForm::Structured] {
        let mut client = fixture.client(replies);
        assert_eq!(
            ask(&mut client, &odd(CommandCode::Trim, payload, 0, 512, EINVAL)).error,
            EINVAL
        );
        assert_eq!(client.read(0, 100).unwrap(), content(0, 100));
    }
    // A write without the flag has a payload all the same.
    let mut client = fixture.client(ReplyForm::Extended);
    let request = client.request(CommandCode::Write, 0, 512);
    let request = RequestHeader { flags: CommandFlags::NONE, ..request };
    assert_eq!(client.ask(&request, &[9; 512]).unwrap().error, 0);
    assert_eq!(client.read(511, 1).unwrap(), [9]);
}

// nbd: extended.filter-refused
#[test]
fn block_status_filters_are_checked() {
    let mut facts = Model::all_facts(SIZE);
    facts.contexts.push("test:piece".to_string());
    facts.contexts.push("test:other".to_string());
    let device = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Deferred);
    let fixture = serve(device, Limits::default());
    let names = ["base:allocation", "test:other"];
    let (mut client, ids) = fixture.client_with_contexts(ReplyForm::Extended, &names);
    assert_eq!(ids.len(), 2);
    let mut status = |len: u64, ids: &[u32], flags: CommandFlags| {
        let mut payload = len.to_be_bytes().to_vec();
        ids.iter().for_each(|id| payload.extend_from_slice(&id.to_be_bytes()));
        let request = client.request(CommandCode::BlockStatus, 0, payload.len() as u64);
        let request = RequestHeader { flags: flags | CommandFlags::PAYLOAD_LEN, ..request };
        client.ask(&request, &payload).unwrap()
    };
    let none = CommandFlags::NONE;
    for chosen in [vec![ids[0]], vec![ids[1]], vec![ids[1], ids[0]]] {
        let answer = status(200_000, &chosen, none);
        assert_eq!(answer.error, 0, "{}", answer.text);
        let mut found: Vec<u32> = answer.status.iter().map(|(id, _)| *id).collect();
        let mut chosen = chosen.clone();
        found.sort_unstable();
        chosen.sort_unstable();
        assert_eq!(found, chosen);
        for (id, runs) in answer.status {
            let total: u64 = runs.iter().map(|run| run.0).sum();
            assert!(total > 0, "{id}");
        }
    }
    let one = status(200_000, &ids, CommandFlags::REQ_ONE);
    assert!(one.status.iter().all(|(_, runs)| runs.len() == 1), "{:?}", one.status);
    assert_eq!(status(4096, &[], none).error, EINVAL, "no context");
    assert_eq!(status(4096, &[ids[0], ids[0]], none).error, EINVAL, "twice");
    assert_eq!(status(4096, &[4711], none).error, EINVAL, "unknown");
    assert_eq!(status(4096, &[1], none).error, EINVAL, "not selected");
    assert_eq!(status(0, &ids, none).error, EINVAL, "an empty range");
    assert_eq!(status(SIZE + 1, &ids, none).error, EINVAL, "out of range");
    assert_eq!(status(u64::MAX, &ids, none).error, EINVAL, "far out of range");
    assert_eq!(status(4096, &[ids[0]; 100], none).error, EINVAL, "more than there can be");
    assert_eq!(status(4096, &[ids[0]; 100_000], none).error, EINVAL, "far more");
    assert_eq!(status(4096, &[ids[0]], none).error, 0, "and it goes on");
    for len in [1, 7, 9, 13] {
        let request = client.request(CommandCode::BlockStatus, 0, len);
        let request = RequestHeader { flags: CommandFlags::PAYLOAD_LEN, ..request };
        assert_eq!(client.ask(&request, &vec![0; len as usize]).unwrap().error, EINVAL, "{len}");
    }
}

// nbd: sizes.errors, sizes.server-einval
#[test]
fn blocks_that_are_not_aligned_are_refused() {
    let mut facts = Model::all_facts(SIZE);
    facts.block.minimum = 4096;
    facts.block.maximum = 64 << 10;
    let device = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
    let fixture = serve(device, Limits::default());
    let mut client = fixture.connect();
    client.hello(3).unwrap();
    assert_eq!(client.go("").unwrap().block_sizes, Some((4096, 4096, 64 << 10)));
    for (at, len, error) in [(512, 4096, EINVAL), (0, 512, EINVAL), (4096, 4096, 0)] {
        for command in [CommandCode::Read, CommandCode::Write, CommandCode::Trim] {
            let odd = odd(command, CommandFlags::NONE, at, len, error);
            assert_eq!(ask(&mut client, &odd).error, error, "{command:?} {len} at {at}");
        }
    }
    let long = odd(CommandCode::Read, CommandFlags::NONE, 0, 128 << 10, EINVAL);
    assert_eq!(ask(&mut client, &long).error, EINVAL);
}

// nbd: flags.read-only, write.eperm
#[test]
fn read_only_exports_refuse_changes() {
    let mut facts = Model::all_facts(SIZE);
    facts.can -= blockhaul_block::Can::CHANGES;
    let model = Model::with_facts(facts).with_content(content(0, SIZE as usize));
    let fixture = serve(ModelDevice::new(model, CompletionOrder::Immediate), Limits::default());
    for replies in FORMS {
        let mut client = fixture.client(replies);
        for command in [CommandCode::Write, CommandCode::Trim, CommandCode::WriteZeroes] {
            let odd = odd(command, CommandFlags::NONE, 0, 512, EPERM);
            assert_eq!(ask(&mut client, &odd).error, EPERM, "{command:?}");
        }
        assert_eq!(client.read(0, 1000).unwrap(), content(0, 1000));
    }
}

// nbd: structured.done-only-when-sure, error.nonzero, read.late-error, read.finish-chunk
// nbd: read.error-chunk, read.df-overflow, write.error, cache.error, zeroes.error
// nbd: errors.eoverflow, errors.enotsup
#[test]
fn errors_of_devices_have_the_documents_numbers_and_a_text() {
    let fast = CommandFlags::FAST_ZERO;
    let none = CommandFlags::NONE;
    let cases = [
        (Kind::Io, CommandCode::Read, none, EIO),
        (Kind::NoSpace, CommandCode::Write, none, ENOSPC),
        (Kind::NoMemory, CommandCode::Write, none, 12),
        (Kind::Unsupported, CommandCode::WriteZeroes, fast, ENOTSUP),
        (Kind::Unsupported, CommandCode::WriteZeroes, none, EINVAL),
        (Kind::Unsupported, CommandCode::Read, none, EINVAL),
        (Kind::TooLarge, CommandCode::Read, none, EINVAL),
        (Kind::Disconnected, CommandCode::Flush, none, EIO),
        (Kind::TimedOut, CommandCode::Read, none, EIO),
        (Kind::ShuttingDown, CommandCode::Write, none, 108),
    ];
    for replies in FORMS {
        // A separate server each: after a failed flush no others reach the device.
        let faulty = FaultDevice::over(model(), 1);
        let fixture = serve(faulty.clone(), Limits::default());
        let mut client = fixture.client(replies);
        for (kind, command, flags, error) in cases {
            faulty.heal();
            faulty.add(FaultRule::new(FaultEffect::Fail(kind)));
            let len = if command == CommandCode::Flush { 0 } else { 512 };
            let answer = ask(&mut client, &odd(command, flags, 0, len, error));
            assert_eq!(answer.error, error, "{kind:?} of {command:?}");
            if replies != ReplyForm::Simple {
                assert_eq!(answer.text, "injected by a test");
            }
        }
        faulty.heal();
        faulty.add(FaultRule::new(FaultEffect::Lose).kind(OpKind::Read));
        assert_eq!(ask(&mut client, &odd(CommandCode::Read, none, 0, 512, EIO)).error, EIO);
        faulty.heal();
        assert_eq!(client.read(0, 1000).unwrap(), content(0, 1000));
    }
}

/// A device that returns fewer extent lists than requested.
struct Forgetful(Arc<ModelDevice>);

impl blockhaul_block::Device for Forgetful {
    fn facts(&self) -> Arc<blockhaul_block::Facts> {
        self.0.facts()
    }

    fn submit(&self, request: blockhaul_block::Request) -> blockhaul_block::PendingRequest {
        match request.kind() {
            OpKind::Extents => Ok(blockhaul_block::Reply::Extents(Vec::new())).into(),
            _ => self.0.submit(request),
        }
    }
}

// nbd: status.one-chunk-each
#[test]
fn a_device_that_forgets_contexts_does_not_hang_its_clients() {
    let fixture = serve(Arc::new(Forgetful(model())), Limits::default());
    let (mut client, _) = fixture.client_with_contexts(ReplyForm::Structured, &["base:allocation"]);
    let status = odd(CommandCode::BlockStatus, CommandFlags::NONE, 0, 512, EIO);
    assert_eq!(ask(&mut client, &status).error, EIO);
}

#[test]
fn half_a_request_harms_nobody() {
    let device = model();
    let fixture = serve(device.clone(), Limits::default());
    let mut head = fixture.client(ReplyForm::Extended);
    let request = head.request(CommandCode::Write, 0, 100_000);
    head.send(&request.encode(blockhaul_wire::RequestForm::Extended).unwrap()[..10]).unwrap();
    let mut payload = fixture.client(ReplyForm::Extended);
    payload.send_request(&request, &[1; 50_000]).unwrap();
    fixture.is_well();
    fixture.wait_for_open(2);
    head.end();
    payload.end();
    fixture.wait_for_open(0);
    assert_eq!(device.bytes(), content(0, SIZE as usize), "half a write is none");
    until("all memory is back", || fixture.pool.reserved() == 0);
}

/// The reply to one request must not wait until the payload of another has arrived.
#[test]
fn answers_do_not_wait_for_other_payloads() {
    let fixture = serve(device(SIZE, CompletionOrder::Immediate), Limits::default());
    for replies in FORMS {
        let mut client = fixture.client(replies);
        let read = client.request(CommandCode::Read, 100, 200);
        let write = client.request(CommandCode::Write, 0, 4096);
        let bytes = content(0, 4096);
        let headers = client.headers;
        let both = [read.encode(headers).unwrap(), write.encode(headers).unwrap()];
        client.send(&[&both[0][..], &both[1][..], &bytes[..1000]].concat()).unwrap();
        let answer = client.receive_answer(&read).unwrap();
        assert_eq!(answer.bytes(100, 200).unwrap(), content(100, 200));
        client.send(&bytes[1000..]).unwrap();
        assert_eq!(client.receive_answer(&write).unwrap().error, 0);
    }
}

// nbd: command-flags.fua-accepted
#[test]
fn fua_is_accepted_on_every_command() {
    use CommandCode::{BlockStatus, Cache, Flush, Read, Trim, Write, WriteZeroes};
    let fixture = fixture();
    for replies in [ReplyForm::Structured, ReplyForm::Extended] {
        let (mut client, _) = fixture.client_with_contexts(replies, &["base:allocation"]);
        for command in [Read, Write, Flush, Trim, Cache, WriteZeroes, BlockStatus] {
            let len = if command == Flush { 0 } else { 512 };
            let odd = odd(command, CommandFlags::FUA, 0, len, 0);
            assert_eq!(ask(&mut client, &odd).error, 0, "{command:?}");
        }
    }
}

// nbd: cache.flags
#[test]
fn unknown_flags_of_cache_are_refused() {
    let fixture = fixture();
    for replies in FORMS {
        let mut client = fixture.client(replies);
        for bit in (1..16).filter(|bit| *bit != 5) {
            let flags = CommandFlags::from_bits(1 << bit);
            assert_eq!(
                ask(&mut client, &odd(CommandCode::Cache, flags, 0, 512, EINVAL)).error,
                EINVAL
            );
        }
        assert_eq!(
            ask(&mut client, &odd(CommandCode::Cache, CommandFlags::NONE, 0, 512, 0)).error,
            0
        );
        assert_eq!(client.read(1, 5000).unwrap(), content(1, 5000), "nothing has changed");
    }
}
