//! Flags and kinds of replies: they reach the device, and replies have a form that the client
//! supports.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{EINVAL, ENOTSUP, FORMS, content, device, serve, serve_exports};
use blockhaul_block::{
    Device, Extent, Facts, OpKind, PendingRequest, Reply, Request, RequestFlags,
};
use blockhaul_catalog::{
    Barrier, Export, ExportClient, Exports, ListedExport, OpenFuture, SharedDevice, Visit,
};
use blockhaul_server::Limits;
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::peer::{ExportDescription, OptionReply};
use blockhaul_testkit::tools::until;
use blockhaul_wire::option::MetaRequest;
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, CommandFlags, ExportFlags, ReplyForm};

const SIZE: u64 = 1 << 20;

// nbd: fua.durable, command-flags.known, command-flags.no-hole
#[test]
fn flags_reach_the_device() {
    let model = device(SIZE, CompletionOrder::Deferred);
    let fixture = serve(model.clone(), Limits::default());
    let (mut client, _) = fixture.client_with_contexts(ReplyForm::Structured, &["base:allocation"]);
    let fua = CommandFlags::FUA;
    let cases = [
        (CommandCode::Write, fua, OpKind::Write, RequestFlags::FUA),
        (CommandCode::Write, CommandFlags::NONE, OpKind::Write, RequestFlags::empty()),
        (CommandCode::Trim, fua, OpKind::Trim, RequestFlags::FUA),
        (CommandCode::WriteZeroes, fua, OpKind::Zero, RequestFlags::FUA),
        (CommandCode::WriteZeroes, CommandFlags::NO_HOLE, OpKind::Zero, RequestFlags::NO_HOLE),
        (CommandCode::WriteZeroes, CommandFlags::FAST_ZERO, OpKind::Zero, RequestFlags::FAST),
        (
            CommandCode::WriteZeroes,
            fua | CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
            OpKind::Zero,
            RequestFlags::FUA | RequestFlags::NO_HOLE | RequestFlags::FAST,
        ),
        (
            CommandCode::BlockStatus,
            CommandFlags::REQ_ONE,
            OpKind::Extents,
            RequestFlags::ONE_EXTENT,
        ),
        // Meaningless, not invalid.
        (CommandCode::Read, fua, OpKind::Read, RequestFlags::empty()),
        (CommandCode::Read, CommandFlags::DF, OpKind::Read, RequestFlags::empty()),
        (CommandCode::Flush, fua, OpKind::Flush, RequestFlags::empty()),
        (CommandCode::Cache, fua, OpKind::Cache, RequestFlags::empty()),
    ];
    for (command, flags, kind, expected) in cases {
        let len = if command == CommandCode::Flush { 0 } else { 4096 };
        let request = RequestHeader { flags, ..client.request(command, 0, len) };
        let payload = if command == CommandCode::Write { vec![1; 4096] } else { Vec::new() };
        assert_eq!(client.ask(&request, &payload).unwrap().error, 0, "{command:?}");
        let seen = *model.seen().last().unwrap();
        assert_eq!((seen.kind, seen.flags, seen.len), (kind, expected, len), "{command:?}");
    }
}

// nbd: flags.fast-zero, command-flags.fast-zero, zeroes.slow, zeroes.fast
#[test]
fn fast_zero_fails_at_once_where_it_is_slow() {
    let slow = ModelDevice::new(Model::new(SIZE).with_slow_zero(), CompletionOrder::Immediate);
    let fixture = serve(slow, Limits::default());
    for replies in FORMS {
        let mut client = fixture.client(replies);
        let zero = client.request(CommandCode::WriteZeroes, 0, 4096);
        let fast = RequestHeader { flags: CommandFlags::FAST_ZERO, ..zero };
        assert_eq!(client.ask(&fast, &[]).unwrap().error, ENOTSUP);
        let zero = client.request(CommandCode::WriteZeroes, 0, 4096);
        assert_eq!(client.ask(&zero, &[]).unwrap().error, 0);
    }
}

// nbd: flags.only-supported, flags.fast-zero-clear
#[test]
fn what_the_device_lacks_is_not_offered_and_refused() {
    let mut facts = Model::all_facts(SIZE);
    facts.can = blockhaul_block::Can::WRITE;
    facts.contexts.clear();
    let device = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
    let fixture = serve(device, Limits::default());
    let mut client = fixture.connect();
    let exported = client.open("", ReplyForm::Structured).unwrap();
    let offered = ExportFlags::from_bits(exported.flags);
    for flag in [
        ExportFlags::READ_ONLY,
        ExportFlags::SEND_FLUSH,
        ExportFlags::SEND_FUA,
        ExportFlags::SEND_TRIM,
        ExportFlags::SEND_WRITE_ZEROES,
        ExportFlags::SEND_FAST_ZERO,
        ExportFlags::SEND_CACHE,
        ExportFlags::CAN_MULTI_CONN,
    ] {
        assert!(!offered.contains(flag), "{offered:?}");
    }
    for command in
        [CommandCode::Trim, CommandCode::WriteZeroes, CommandCode::Cache, CommandCode::BlockStatus]
    {
        let request = client.request(command, 0, 512);
        assert_eq!(client.ask(&request, &[]).unwrap().error, EINVAL, "{command:?}");
    }
    let flush = client.request(CommandCode::Flush, 0, 0);
    assert_eq!(client.ask(&flush, &[]).unwrap().error, EINVAL);
    let fua =
        RequestHeader { flags: CommandFlags::FUA, ..client.request(CommandCode::Write, 0, 1) };
    assert_eq!(client.ask(&fua, &[1]).unwrap().error, EINVAL);
    assert_eq!(client.write(0, &[1]).unwrap(), 0);
}

// nbd: chunk.hole-inside, chunk.hole-no-overlap, read.simple, read.complete
#[test]
fn holes_are_told_as_the_client_may_take_them() {
    let mut model = Model::new(40 << 20).with_holes();
    model
        .apply(blockhaul_block::Request::write(4096, blockhaul_io::Data::copy_of(&[5; 4096])))
        .unwrap();
    let fixture = serve(ModelDevice::new(model, CompletionOrder::Immediate), Limits::default());
    let most = 32 << 20;
    for replies in FORMS {
        let mut client = fixture.client(replies);
        for (at, len) in [(0, 4096), (8191 + 1, 1), (8192, 300_001), (8192, most)] {
            let request = client.request(CommandCode::Read, at, len);
            let answer = client.ask(&request, &[]).unwrap();
            if replies == ReplyForm::Simple {
                assert!(answer.data[0].1.iter().all(|&byte| byte == 0));
                assert_eq!(answer.data[0].1.len() as u64, len);
            } else {
                assert_eq!(answer.holes, [(at, len)]);
                assert!(answer.data.is_empty());
            }
        }
        let mut expected = vec![0; 12288];
        expected[4096..8192].fill(5);
        assert_eq!(client.read(0, 12288).unwrap(), expected);
    }
    // The server releases a reply after it was sent.
    until("all memory is back", || fixture.pool.reserved() == 0);
}

// nbd: structured.payload, structured.done-only-when-sure, flags.df-set, structured.read
// nbd: chunk.data-inside, chunk.no-overlap, read.reply-form, read.chunks, read.chunk-inside
// nbd: read.complete, read.done-on-content, read.df-one-chunk, read.df-no-hole, read.df-64k
// nbd: extended.read-form
#[test]
fn data_comes_in_one_chunk() {
    let fixture = serve(device(SIZE, CompletionOrder::Deferred), Limits::default());
    for replies in [ReplyForm::Structured, ReplyForm::Extended] {
        let mut client = fixture.client(replies);
        for flags in [CommandFlags::NONE, CommandFlags::DF] {
            let request = RequestHeader { flags, ..client.request(CommandCode::Read, 77, 900_000) };
            let answer = client.ask(&request, &[]).unwrap();
            assert_eq!((answer.messages, answer.data.len()), (1, 1));
            assert_eq!(answer.data[0], (77, content(77, 900_000)));
        }
    }
}

// nbd: command-flags.req-one, status.req-one, block-status.req-one, extended.status-high-bits
#[test]
fn extents_are_bounded_and_cut() {
    let model = device(SIZE, CompletionOrder::Immediate);
    for at in (0..SIZE).step_by(8192) {
        model.model().apply(blockhaul_block::Request::zero(at, 4096)).unwrap();
    }
    let fixture = serve(model, Limits { extents: 10, ..Limits::default() });
    for replies in [ReplyForm::Structured, ReplyForm::Extended] {
        let (mut client, ids) = fixture.client_with_contexts(replies, &["base:allocation"]);
        let request = client.request(CommandCode::BlockStatus, 0, SIZE);
        let answer = client.ask(&request, &[]).unwrap();
        let expected: Vec<_> = (0..10).map(|i| (4096, if i % 2 == 0 { 3 } else { 0 })).collect();
        assert_eq!(answer.status, [(ids[0], expected)]);
        let request = client.request(CommandCode::BlockStatus, 5000, 100_000);
        let request = RequestHeader { flags: CommandFlags::REQ_ONE, ..request };
        let answer = client.ask(&request, &[]).unwrap();
        assert_eq!(answer.status, [(ids[0], vec![(3192, 0)])]);
        let request = client.request(CommandCode::BlockStatus, 4097, 100);
        let request = RequestHeader { flags: CommandFlags::REQ_ONE, ..request };
        let answer = client.ask(&request, &[]).unwrap();
        assert_eq!(answer.status, [(ids[0], vec![(100, 0)])]);
    }
}

// nbd: sizes.advertised, sizes.maximum
#[test]
fn small_limits_still_make_a_valid_offer() {
    for payload in [1, 1000, 4095, 65_537] {
        let limits = Limits { payload, ..Limits::default() };
        let fixture = serve(device(SIZE, CompletionOrder::Immediate), limits);
        let mut client = fixture.connect();
        client.hello(3).unwrap();
        let (minimum, preferred, maximum) = client.go("").unwrap().block_sizes.unwrap();
        assert!(preferred.is_power_of_two() && preferred >= 512 && preferred >= minimum);
        assert!(maximum >= preferred);
        let most = maximum as usize;
        assert_eq!(client.read(3, most).unwrap(), content(3, most));
        let longer = client.request(CommandCode::Read, 0, u64::from(maximum) + 1);
        assert_eq!(client.ask(&longer, &[]).unwrap().error, EINVAL);
    }
}

/// Delays writes, and records which workers carried them out.
struct Slow {
    model: Arc<ModelDevice>,
    workers: Mutex<BTreeSet<usize>>,
}

impl Device for Slow {
    fn facts(&self) -> Arc<Facts> {
        self.model.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if request.kind() == OpKind::Write {
            std::thread::sleep(Duration::from_millis(2));
            self.workers.lock().unwrap().insert(blockhaul_io::worker());
        }
        self.model.submit(request)
    }
}

#[test]
fn large_writes_are_shared_with_an_idle_worker_when_more_have_come() {
    let len = 256 << 10;
    let count = 20;
    let size = len * count;
    let model = device(size, CompletionOrder::Immediate);
    let slow = Arc::new(Slow { model, workers: Mutex::default() });
    let fixture = serve(slow.clone(), Limits::default());
    let workers = || std::mem::take(&mut *slow.workers.lock().unwrap());
    let mut client = fixture.client(ReplyForm::Simple);
    let bytes = |nth: u64, round: u8| vec![nth as u8 ^ round; len as usize];
    for nth in 0..count {
        assert_eq!(client.write(nth * len, &vec![1; len as usize]).unwrap(), 0);
    }
    assert_eq!(workers().len(), 1, "one at a time stays where it came");
    let mut round = 0x5a;
    // Again if this thread did not get to send more before the server had checked, or the other
    // worker was not asleep yet.
    until("the idle worker helps", || {
        round = u8::wrapping_add(round, 1);
        let mut asked: BTreeSet<u64> = (0..count)
            .map(|nth| {
                let request = client.request(CommandCode::Write, nth * len, len);
                client.send_request(&request, &bytes(nth, round)).unwrap();
                request.cookie
            })
            .collect();
        // In whatever order they come.
        for _ in 0..count {
            assert_eq!(client.receive_u32().unwrap(), blockhaul_wire::magic::SIMPLE_REPLY);
            assert_eq!(client.receive_u32().unwrap(), 0);
            assert!(asked.remove(&client.receive_u64().unwrap()));
        }
        for nth in 0..count {
            assert_eq!(client.read(nth * len, len as usize).unwrap(), bytes(nth, round));
        }
        workers().len() == 2
    });
}

/// Storage that cannot be opened, and counts attempts.
#[derive(Clone, Default)]
struct Shut(Arc<AtomicU64>);

impl Exports for Shut {
    fn admit(&self, _client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let visit: Arc<dyn Visit> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(visit)))
    }
}

impl Visit for Shut {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn open(&self, _name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        let tries = self.0.fetch_add(1, Ordering::Relaxed) + 1;
        let error =
            blockhaul_block::Error::new(blockhaul_block::Kind::NotFound, format!("try {tries}"));
        Box::pin(std::future::ready(Err(error)))
    }
}

#[test]
fn what_cannot_be_opened_for_its_contexts_is_not_tried_again_for_the_choice_that_follows() {
    let shut = Shut::default();
    let fixture = serve_exports(Arc::new(shut.clone()));
    let mut client = fixture.connect();
    client.hello(3).unwrap();
    client.negotiate(ReplyForm::Structured).unwrap();
    let contexts = ["base:allocation"];
    let refused = |said: Result<ExportDescription, String>, tries: u64| {
        let why = said.unwrap_err();
        assert!(why.contains(&format!("try {tries}")), "{why}");
        assert_eq!(shut.0.load(Ordering::Relaxed), tries);
    };
    client.select("a", &contexts).unwrap_err();
    refused(client.go("a"), 1);
    // Once: a fix in the meantime takes effect.
    refused(client.go("a"), 2);
    // Only the export that it was about.
    client.select("a", &contexts).unwrap_err();
    refused(client.go("b"), 4);
    refused(client.go("a"), 5);
    // Only the option that follows.
    client.select("a", &contexts).unwrap_err();
    client.option(blockhaul_wire::magic::OPT_LIST, &[]).unwrap();
    refused(client.go("a"), 7);
}

#[test]
fn a_context_appears_while_a_client_is_connected() {
    let shared =
        SharedDevice::new("", "", blockhaul_block::fence(device(SIZE, CompletionOrder::Deferred)));
    let fixture = serve_exports(shared.clone());
    let names = ["base:allocation", "test:piece"];
    let (mut before, old) = fixture.client_with_contexts(ReplyForm::Extended, &names);
    assert_eq!(old.len(), 1, "the other one does not exist yet");

    let mut facts = Model::all_facts(SIZE);
    facts.contexts.push("test:piece".to_string());
    let model = Model::with_facts(facts).with_content(content(0, SIZE as usize));
    let device = blockhaul_block::fence(ModelDevice::new(model, CompletionOrder::Deferred));
    let switch = shared.switch().clone();
    fixture.runtime.block_on(move || async move {
        switch
            .swap(device, Barrier::Within(Duration::from_secs(10)), async || Ok(()))
            .await
            .unwrap();
    });

    let (mut after, new) = fixture.client_with_contexts(ReplyForm::Extended, &names);
    assert_eq!(new.len(), 2);
    for (client, ids) in [(&mut before, old), (&mut after, new)] {
        let request = client.request(CommandCode::BlockStatus, 0, SIZE);
        let answer = client.ask(&request, &[]).unwrap();
        assert_eq!(answer.error, 0, "{}", answer.text);
        let mut answered: Vec<u32> = answer.status.iter().map(|(id, _)| *id).collect();
        answered.sort_unstable();
        assert_eq!(answered, ids, "each client gets what it selected");
        assert_eq!(client.read(100, 5000).unwrap(), content(100, 5000));
    }
}

/// A device with three contexts, whose states fit into 32 bits.
struct Narrow(Arc<ModelDevice>);

impl Narrow {
    fn new() -> Arc<Narrow> {
        let mut facts = Model::all_facts(SIZE);
        facts.contexts.extend(["test:piece", "test:other"].map(str::to_string));
        Arc::new(Narrow(ModelDevice::new(Model::with_facts(facts), CompletionOrder::Deferred)))
    }
}

impl Device for Narrow {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let pending = self.0.submit(request);
        PendingRequest::start(async move {
            let Reply::Extents(lists) = pending.await? else { return Ok(Reply::Done) };
            let narrow = |run: &Extent| Extent { state: run.state & 0xffff, ..*run };
            let lists = lists.iter().map(|list| list.runs().iter().map(narrow).collect());
            Ok(Reply::Extents(lists.collect()))
        })
    }
}

// nbd: structured.done-last, meta.one-chunk-each, reply-flags.done, status.one-chunk-each
// nbd: block-status.chunks
#[test]
fn several_contexts_end_with_the_last_chunk() {
    let fixture = serve(Narrow::new(), Limits::default());
    let names = ["test:other", "base:allocation", "test:piece"];
    for replies in [ReplyForm::Structured, ReplyForm::Extended] {
        let (mut client, ids) = fixture.client_with_contexts(replies, &names);
        for flags in [CommandFlags::NONE, CommandFlags::REQ_ONE] {
            let request =
                RequestHeader { flags, ..client.request(CommandCode::BlockStatus, 0, SIZE) };
            // Reads chunks up to the first with DONE, each for this request.
            let answer = client.ask(&request, &[]).unwrap();
            assert_eq!((answer.error, answer.messages), (0, 3), "{}", answer.text);
            let mut answered: Vec<u32> = answer.status.iter().map(|(id, _)| *id).collect();
            answered.sort_unstable();
            let mut due = ids.clone();
            due.sort_unstable();
            assert_eq!(answered, due, "each context once");
        }
        // Nothing follows the last chunk.
        let flush = client.request(CommandCode::Flush, 0, 0);
        assert_eq!(client.ask(&flush, &[]).unwrap().error, 0);
    }
}

// nbd: meta.name, meta.namespace, base.set-ignores-wildcard, base.list-wildcard
// nbd: base.unknown-leaf, meta.unknown-namespace, meta.none-found, meta.list-all
// nbd: meta.list-matching
#[test]
fn queries_for_contexts_follow_the_document() {
    use blockhaul_wire::magic::{OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, REP_ACK};
    let mut facts = Model::all_facts(SIZE);
    // Two of these are no names of contexts.
    facts.contexts.extend(["plain", "test:piece", ":", "test:other"].map(str::to_string));
    let device = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Deferred);
    let fixture = serve(device, Limits::default());
    let mut client = fixture.connect();
    client.hello(3).unwrap();
    client.negotiate(ReplyForm::Structured).unwrap();
    let mut found = |code: u32, queries: &[&str]| {
        let queries = queries.iter().map(|query| (*query).to_string()).collect();
        let mut payload = Vec::new();
        MetaRequest { export: String::new(), queries }.emit(&mut payload);
        let mut replies = client.option(code, &payload).unwrap();
        assert_eq!(replies.pop().unwrap().kind, REP_ACK);
        let name = |reply: OptionReply| String::from_utf8(reply.payload[4..].to_vec()).unwrap();
        replies.into_iter().map(name).collect::<Vec<_>>()
    };
    let all = ["base:allocation", "test:piece", "test:other"];
    let none: [&str; 0] = [];
    for (queries, listed, selected) in [
        (&[][..], &all[..], &none[..]),
        (&["base:"], &all[..1], &none),
        (&["test:"], &all[1..], &none),
        (&["base:allocation", "base:allocation"], &all[..1], &all[..1]),
        (&["base:future", "plain", ":"], &none, &none),
        (&["x-unknown:a", "qemu:dirty-bitmap:b", "unknown:"], &none, &none),
        (&["x-unknown:a", "test:other"], &all[2..], &all[2..]),
    ] {
        assert_eq!(found(OPT_LIST_META_CONTEXT, queries), listed, "{queries:?}");
        assert_eq!(found(OPT_SET_META_CONTEXT, queries), selected, "{queries:?}");
    }
}

// nbd: chunk.maximum
#[test]
fn lists_of_extents_are_within_the_maximum_payload() {
    let model = device(SIZE, CompletionOrder::Immediate);
    for at in (0..SIZE).step_by(1024) {
        model.model().apply(blockhaul_block::Request::zero(at, 512)).unwrap();
    }
    for payload in [1000, 4096] {
        let fixture = serve(model.clone(), Limits { payload, ..Limits::default() });
        for replies in [ReplyForm::Structured, ReplyForm::Extended] {
            let mut client = fixture.connect();
            client.hello(3).unwrap();
            client.negotiate(replies).unwrap();
            client.select("", &["base:allocation"]).unwrap();
            let (_, _, maximum) = client.go("").unwrap().block_sizes.unwrap();
            let request = client.request(CommandCode::BlockStatus, 0, SIZE);
            let answer = client.ask(&request, &[]).unwrap();
            let extents = answer.status[0].1.len();
            assert!(extents > 0 && extents * 16 <= maximum as usize, "{extents} for {maximum}");
        }
    }
}
