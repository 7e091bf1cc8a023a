//! The conformance suite can fail: devices that each violate one sentence, and the check that
//! detects it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{
    Can, Device, Error, Extents, Facts, FileRange, Kind, LeaseAccess, Op, OpKind, Outcome,
    PendingRequest, Reply, Request, RequestFlags,
};
use blockhaul_catalog::{HandleOpener, OpenFuture, OpenedDevice};
use blockhaul_io::{Completer, Data, IoEngine};
use blockhaul_testkit::conform::{self, ConformOptions, ConformReport, InitialContent, Subject};
use blockhaul_testkit::fault::FaultDevice;
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

/// How a device violates the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Broken {
    ShortRead,
    HoleForData,
    LostWrite,
    LateWrite,
    LostCompletion,
    NeverCompletes,
    HeldUntilTheNext,
    AbandonedWithItsPending,
    Blocks,
    OneAtATime,
    ForgetsNeighbours,
    WrongKindOfReply,
    DifferentEachTime,
    LastByteFails,
    LongOnesFail,
    ZeroForgetsTheLastByte,
    ZeroTakesTheWholeBlock,
    FastZeroFailsOtherwise,
    TrimTakesTheWholeBlock,
    NoHoleIsIgnored,
    ExtentsOverrun,
    ExtentsEmpty,
    ExtentsForNoContext,
    ExtentsUnaligned,
    TwoForOneExtent,
    DataCalledZero,
    DataCalledHole,
    KeepsBuffers,
    OneWorkerOnly,
    WrongLease,
    ChangesWithoutWriting,
    NoPowerOfTwo,
}

struct Device1 {
    how: Broken,
    inner: Arc<ModelDevice>,
    facts: Arc<Facts>,
    count: AtomicU64,
    held: Mutex<Vec<(Request, Completer<Outcome>)>>,
    kept: Mutex<Vec<Data>>,
    last: Mutex<Option<blockhaul_io::Ticket<()>>>,
    home: usize,
    lease: Option<blockhaul_io::File>,
}

fn broken(how: Broken) -> Arc<dyn Device> {
    let mut facts = Model::all_facts(200_000);
    match how {
        Broken::ExtentsUnaligned => facts.block.minimum = 512,
        Broken::ChangesWithoutWriting => facts.can -= Can::WRITE,
        Broken::NoPowerOfTwo => facts.block.preferred = 5000,
        Broken::WrongLease => facts.can = Can::WRITE,
        _ => {}
    }
    let inner = ModelDevice::new(Model::with_facts(facts.clone()), CompletionOrder::Immediate);
    let lease = (how == Broken::WrongLease).then(|| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(200_000).unwrap();
        blockhaul_io::File::new(file.into())
    });
    Arc::new(Device1 {
        how,
        inner,
        facts: Arc::new(facts),
        count: AtomicU64::new(0),
        held: Mutex::default(),
        kept: Mutex::default(),
        last: Mutex::default(),
        home: blockhaul_io::worker(),
        lease,
    })
}

impl Device for Device1 {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let kind = request.kind();
        let at = request.at;
        let len = request.len;
        let flags = request.flags;
        let inner = self.inner.clone();
        let later = Duration::from_millis(2);
        match self.how {
            Broken::ShortRead if kind == OpKind::Read && len > 4096 => {
                return PendingRequest::start(async move {
                    match inner.submit(request).await? {
                        Reply::Data(data) => Ok(Reply::Data(data.slice(0, data.len() - 1))),
                        other => Ok(other),
                    }
                });
            }
            Broken::HoleForData if kind == OpKind::Read && len > 4096 => {
                return PendingRequest::ready(Ok(Reply::Hole));
            }
            Broken::LostWrite if kind == OpKind::Write && count % 7 == 3 => {
                return PendingRequest::ready(Ok(Reply::Done));
            }
            Broken::LateWrite if kind == OpKind::Write => {
                drop(blockhaul_io::start(async move {
                    blockhaul_io::sleep(later).await;
                    inner.submit(request).await
                }));
                return PendingRequest::ready(Ok(Reply::Done));
            }
            Broken::LostCompletion if count % 11 == 5 => return PendingRequest::completer().1,
            Broken::NeverCompletes if count % 11 == 5 => {
                let (completer, pending) = PendingRequest::completer();
                std::mem::forget(completer);
                return pending;
            }
            Broken::HeldUntilTheNext => {
                let (completer, pending) = PendingRequest::completer();
                let before =
                    std::mem::replace(&mut *self.held.lock().unwrap(), vec![(request, completer)]);
                for (request, completer) in before {
                    completer.complete(inner.model().apply(request));
                }
                return pending;
            }
            Broken::AbandonedWithItsPending => {
                let (completer, pending) = PendingRequest::completer();
                drop(blockhaul_io::start(async move {
                    blockhaul_io::yield_now().await;
                    blockhaul_io::yield_now().await;
                    if !completer.is_abandoned() {
                        let outcome = inner.submit(request).await;
                        completer.complete(outcome);
                    }
                }));
                return pending;
            }
            Broken::Blocks => std::thread::sleep(Duration::from_millis(30)),
            Broken::OneAtATime => {
                let (done, turn) = blockhaul_io::ticket();
                let before = self.last.lock().unwrap().replace(turn);
                return PendingRequest::start(async move {
                    if let Some(before) = before {
                        let _ = before.await;
                    }
                    blockhaul_io::sleep(later).await;
                    let outcome = inner.submit(request).await;
                    done.complete(());
                    outcome
                });
            }
            // Reads a block, waits, and writes all of it back.
            Broken::ForgetsNeighbours if kind == OpKind::Write => {
                let block = (at / 512 * 512) as usize;
                let end = ((at + len).next_multiple_of(512) as usize).min(200_000);
                let mut copy = inner.model().bytes()[block..end].to_vec();
                let Op::Write(data) = request.op else { unreachable!() };
                copy[at as usize - block..][..data.len()].copy_from_slice(data.bytes());
                return PendingRequest::start(async move {
                    blockhaul_io::yield_now().await;
                    inner.submit(Request::write(block as u64, Data::copy_of(&copy))).await
                });
            }
            Broken::WrongKindOfReply if kind == OpKind::Flush => {
                return PendingRequest::ready(Ok(Reply::Hole));
            }
            Broken::DifferentEachTime if kind == OpKind::Read => {
                return PendingRequest::ready(Ok(Reply::Data(Data::copy_of(&vec![
                    count as u8;
                    len as usize
                ]))));
            }
            Broken::LastByteFails if kind == OpKind::Read && at + len == 200_000 && len == 1 => {
                return Error::new(Kind::Io, "cannot read the last byte").into();
            }
            Broken::LongOnesFail if kind == OpKind::Read && len > 100_000 => {
                return Error::new(Kind::Invalid, "too long").into();
            }
            Broken::ZeroForgetsTheLastByte if kind == OpKind::Zero && len > 1 => request.len -= 1,
            Broken::ZeroTakesTheWholeBlock if kind == OpKind::Zero => whole_block(&mut request),
            Broken::FastZeroFailsOtherwise if flags.contains(RequestFlags::FAST) => {
                return Error::new(Kind::Io, "cannot zero fast").into();
            }
            Broken::TrimTakesTheWholeBlock if kind == OpKind::Trim => whole_block(&mut request),
            Broken::NoHoleIsIgnored => request.flags -= RequestFlags::NO_HOLE,
            Broken::ExtentsOverrun if kind == OpKind::Extents => {
                return extents(Extents::one(len + 1, 0));
            }
            Broken::ExtentsEmpty if kind == OpKind::Extents => return extents(Extents::new()),
            Broken::ExtentsForNoContext if kind == OpKind::Extents => {
                return PendingRequest::ready(Ok(Reply::Extents(Vec::new())));
            }
            Broken::ExtentsUnaligned if kind == OpKind::Extents => {
                let mut list = Extents::one(100, 0);
                list.push(len - 100, 1);
                return extents(list);
            }
            Broken::TwoForOneExtent if kind == OpKind::Extents && len > 1 => {
                let mut list = Extents::one(1, 0);
                list.push(1, 1);
                return extents(list);
            }
            Broken::DataCalledZero if kind == OpKind::Extents => {
                return extents(Extents::one(len, blockhaul_block::ZERO));
            }
            Broken::DataCalledHole if kind == OpKind::Extents => {
                return extents(Extents::one(len, blockhaul_block::HOLE));
            }
            Broken::KeepsBuffers => {
                if let Op::Write(data) = &request.op {
                    self.kept.lock().unwrap().push(data.clone());
                }
            }
            Broken::OneWorkerOnly if blockhaul_io::worker() != self.home => {
                return Error::new(Kind::Io, "called on another worker").into();
            }
            _ => {}
        }
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, _access: LeaseAccess) -> Option<FileRange> {
        Some(FileRange { file: self.lease.clone()?, at, len, past_cache: false })
    }
}

fn extents(list: Extents) -> PendingRequest {
    PendingRequest::ready(Ok(Reply::Extents(vec![list])))
}

fn whole_block(request: &mut Request) {
    let end = (request.at + request.len).next_multiple_of(512).min(200_000);
    request.at = request.at / 512 * 512;
    request.len = end - request.at;
}

fn quick() -> ConformOptions {
    ConformOptions {
        engines: vec![IoEngine::Threads],
        request_timeout: Duration::from_millis(250),
        check_timeout: Duration::from_secs(10),
        submit_max: Duration::from_millis(15),
        rounds: 6,
        // Random findings must be reproducible.
        seed: Some(1),
        ..ConformOptions::default()
    }
}

fn run(how: Broken, options: ConformOptions) -> ConformReport {
    // Emulation of small blocks would correct the extents.
    let options = if how == Broken::ExtentsUnaligned { options.raw() } else { options };
    conform::run(&format!("{how:?}"), options, move || async move { Ok(broken(how)) })
}

#[test]
fn each_broken_device_is_found_out_by_the_check_of_its_sentence() {
    let cases: &[(Broken, &[&str])] = &[
        (Broken::ShortRead, &["a_read_answers_exactly_the_bytes_asked_for"]),
        (Broken::HoleForData, &["a_read_answers_exactly_the_bytes_asked_for"]),
        (Broken::LostWrite, &["a_completed_write_is_seen_by_later_reads"]),
        (Broken::LateWrite, &["a_completed_write_is_seen_by_later_reads"]),
        (Broken::LostCompletion, &["each_request_completes"]),
        (Broken::NeverCompletes, &["each_request_completes"]),
        (Broken::HeldUntilTheNext, &["a_request_has_started_when_submit_returns"]),
        (Broken::AbandonedWithItsPending, &["dropping_a_pending_detaches"]),
        (Broken::Blocks, &["submit_never_blocks"]),
        (Broken::OneAtATime, &["sixty_four_requests_are_at_work_at_once"]),
        (Broken::ForgetsNeighbours, &["neighbours_in_flight_leave_each_other_alone"]),
        (Broken::WrongKindOfReply, &["a_flush_makes_completed_writes_durable"]),
        (Broken::DifferentEachTime, &["the_content_is_as_told"]),
        (Broken::LastByteFails, &["a_read_answers_exactly_the_bytes_asked_for"]),
        (Broken::LongOnesFail, &["requests_at_the_limits_are_served"]),
        (Broken::ZeroForgetsTheLastByte, &["zero_makes_the_range_read_as_zeroes"]),
        (Broken::ZeroTakesTheWholeBlock, &["zero_makes_the_range_read_as_zeroes"]),
        (Broken::FastZeroFailsOtherwise, &["fast_zero_works_or_is_unsupported"]),
        (Broken::TrimTakesTheWholeBlock, &["trim_leaves_its_neighbours_alone"]),
        (Broken::NoHoleIsIgnored, &["no_hole_keeps_the_range_allocated"]),
        (
            Broken::ExtentsOverrun,
            &["extents_start_at_the_offset_and_end_within_the_request", "one_extent_means_one"],
        ),
        (Broken::ExtentsEmpty, &["extents_start_at_the_offset_and_end_within_the_request"]),
        (Broken::ExtentsForNoContext, &["extents_start_at_the_offset_and_end_within_the_request"]),
        (Broken::ExtentsUnaligned, &["extents_start_at_the_offset_and_end_within_the_request"]),
        (Broken::TwoForOneExtent, &["one_extent_means_one"]),
        (Broken::DataCalledZero, &["data_is_never_called_zero_or_hole"]),
        (Broken::DataCalledHole, &["data_is_never_called_zero_or_hole"]),
        (Broken::KeepsBuffers, &["a_pool_of_one_request_is_enough"]),
        (Broken::OneWorkerOnly, &["handles_move_between_workers", "workers_write_disjoint_ranges"]),
        (Broken::WrongLease, &["a_lease_shows_the_same_bytes"]),
        (Broken::ChangesWithoutWriting, &["the_facts_are_consistent"]),
        (Broken::NoPowerOfTwo, &["the_facts_are_consistent"]),
    ];
    for (how, checks) in cases {
        let mut options = ConformOptions { only: checks.to_vec(), ..quick() };
        if *how == Broken::OneAtATime {
            options.latency = Some(Duration::from_millis(2));
        }
        let report = run(*how, options);
        assert_eq!(report.results.len(), checks.len());
        for check in *checks {
            assert!(report.failed(check), "{how:?} passed {check}: {report:?}");
        }
    }
}

#[test]
fn random_requests_find_most_of_them_too() {
    for how in [
        Broken::ShortRead,
        Broken::HoleForData,
        Broken::LostWrite,
        Broken::LateWrite,
        Broken::NeverCompletes,
        Broken::ForgetsNeighbours,
        Broken::WrongKindOfReply,
        Broken::ZeroForgetsTheLastByte,
        Broken::ZeroTakesTheWholeBlock,
        Broken::TrimTakesTheWholeBlock,
        Broken::ExtentsForNoContext,
        Broken::DataCalledZero,
    ] {
        let check = "random_requests_match_the_model";
        let report = run(how, ConformOptions { only: vec![check], ..quick() });
        assert!(report.failed(check), "{how:?} passed: {report:?}");
    }
}

#[test]
fn a_failing_sequence_is_shrunk_and_its_seed_is_told() {
    let check = "random_requests_match_the_model";
    // A timeout on a busy machine is a failure, too.
    let ConformOptions { request_timeout, check_timeout, .. } = ConformOptions::default();
    let options =
        || ConformOptions { only: vec![check], request_timeout, check_timeout, ..quick() };
    let report = run(Broken::ZeroForgetsTheLastByte, options());
    let (_, _, text) = report.failures().next().unwrap();
    assert!(text.contains("steps are enough"), "{text}");
    let caught = std::panic::catch_unwind(|| {
        conform::check("named", options(), || async { Ok(broken(Broken::ZeroForgetsTheLastByte)) });
    });
    let text = *caught.unwrap_err().downcast::<String>().unwrap();
    assert!(text.contains("named breaks the contract (BLOCKHAUL_SEED=0x"), "{text}");
    assert!(text.contains(check), "{text}");
}

#[test]
fn a_device_that_does_not_open_or_blocks_for_ever_is_a_failure_not_a_hang() {
    let only = vec!["the_facts_are_consistent"];
    let closed = conform::run("closed", ConformOptions { only, ..quick() }, || async {
        Err::<Arc<dyn Device>, _>(Error::new(Kind::NotFound, "no such device"))
    });
    assert!(closed.failed("the_facts_are_consistent"));

    struct Stuck(Arc<ModelDevice>);
    impl Device for Stuck {
        fn facts(&self) -> Arc<Facts> {
            self.0.facts()
        }
        fn submit(&self, _request: Request) -> PendingRequest {
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }
    let options = ConformOptions {
        only: vec!["each_request_completes"],
        check_timeout: Duration::from_millis(400),
        ..quick()
    };
    let stuck = conform::run("stuck", options, || async {
        let inner = ModelDevice::new(Model::new(8192), CompletionOrder::Immediate);
        Ok(Arc::new(Stuck(inner)) as Arc<dyn Device>)
    });
    assert!(stuck.failed("each_request_completes"));
}

#[test]
fn content_that_is_not_as_told_is_found() {
    let check = "the_content_is_as_told";
    let options = ConformOptions { only: vec![check], ..quick() };
    for content in [InitialContent::Zeroes, InitialContent::oracle(|at| (at % 250) as u8)] {
        let report = conform::run("content", options.clone().content(content), || async {
            let bytes = (0..100_000).map(|at| (at % 251) as u8).collect();
            let model = Model::new(100_000).with_content(bytes);
            Ok(ModelDevice::new(model, CompletionOrder::Immediate) as Arc<dyn Device>)
        });
        assert!(report.failed(check));
    }
}

struct Elsewhere;

impl HandleOpener for Elsewhere {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(async {
            let other = ModelDevice::new(Model::new(100_000), CompletionOrder::Immediate);
            Ok(other as Arc<dyn Device>)
        })
    }
}

#[test]
fn handles_on_different_storage_are_found() {
    let check = "a_flush_covers_all_handles";
    let report =
        conform::run("handles", ConformOptions { only: vec![check], ..quick() }, || async {
            let device = ModelDevice::new(Model::new(100_000), CompletionOrder::Immediate);
            Ok(OpenedDevice { device, more: Some(Arc::new(Elsewhere)) })
        });
    assert!(report.failed(check), "{report:?}");
}

/// How a layer handles a failed flush below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flushing {
    PassesFailuresOn,
    Repeats,
    RepeatsInTheBackground,
    Hides,
    ForgetsThatItHasFailed,
    ForgetsOnOtherHandles,
}

struct Layer1 {
    how: Flushing,
    below: Arc<FaultDevice>,
    failed: AtomicU64,
    second: bool,
}

impl Device for Layer1 {
    fn facts(&self) -> Arc<Facts> {
        self.below.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if request.kind() != OpKind::Flush {
            return self.below.submit(request);
        }
        let forgets = match self.how {
            Flushing::ForgetsThatItHasFailed => self.failed.fetch_add(1, Ordering::Relaxed) > 0,
            Flushing::ForgetsOnOtherHandles => self.second,
            _ => false,
        };
        if forgets {
            return PendingRequest::ready(Ok(Reply::Done));
        }
        let how = self.how;
        let below = self.below.clone();
        PendingRequest::start(async move {
            let outcome = below.submit(Request::flush()).await;
            match how {
                Flushing::Repeats if outcome.is_err() => below.submit(Request::flush()).await,
                Flushing::RepeatsInTheBackground if outcome.is_err() => {
                    drop(blockhaul_io::start(async move {
                        blockhaul_io::sleep(Duration::from_millis(5)).await;
                        below.submit(Request::flush()).await
                    }));
                    outcome
                }
                Flushing::Hides => Ok(Reply::Done),
                _ => outcome,
            }
        })
    }
}

struct Second(Arc<FaultDevice>, Flushing);

impl HandleOpener for Second {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let device: Arc<dyn Device> = layer(self.1, self.0.clone(), true);
        Box::pin(std::future::ready(Ok(device)))
    }
}

fn layer(how: Flushing, below: Arc<FaultDevice>, second: bool) -> Arc<Layer1> {
    Arc::new(Layer1 { how, below, failed: AtomicU64::new(0), second })
}

#[test]
fn layers_that_do_not_pass_failed_flushes_on_are_found() {
    let reported = "a_failed_flush_is_reported_and_not_repeated";
    let stays = "no_flush_succeeds_while_those_below_fail";
    let cases: [(Flushing, &[&str]); 6] = [
        (Flushing::PassesFailuresOn, &[]),
        (Flushing::Repeats, &[reported]),
        (Flushing::RepeatsInTheBackground, &[reported]),
        (Flushing::Hides, &[reported, stays]),
        (Flushing::ForgetsThatItHasFailed, &[stays]),
        (Flushing::ForgetsOnOtherHandles, &[stays]),
    ];
    for (how, wrong) in cases {
        let options = ConformOptions { only: vec![reported, stays], ..quick() };
        let report = conform::run(&format!("{how:?}"), options, move || async move {
            let model = ModelDevice::new(Model::new(100_000), CompletionOrder::Immediate);
            let below = FaultDevice::over(model, 1);
            let device: Arc<dyn Device> = layer(how, below.clone(), false);
            let opened = OpenedDevice { device, more: Some(Arc::new(Second(below.clone(), how))) };
            Ok(Subject::from(opened).below(below))
        });
        for check in [reported, stays] {
            assert_eq!(report.failed(check), wrong.contains(&check), "{how:?}: {report:?}");
            assert_eq!(report.skipped(check), None, "{how:?}");
        }
    }
}

/// How a layer handles the promises of the device below that it passes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hinting {
    Honours,
    ZeroesAreOnes,
    TakesLateRoomAtOnce,
    LooksAtParkedPayloads,
    LosesParkedPayloads,
    AnswersTheFirstContextOnly,
}

struct Layer2 {
    how: Hinting,
    below: Arc<ModelDevice>,
}

impl Device for Layer2 {
    fn facts(&self) -> Arc<Facts> {
        Arc::new(Facts::same(&self.below.facts()))
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        match (self.how, op) {
            (Hinting::ZeroesAreOnes, Op::Read(room)) => {
                let reading = self.below.submit(Request::read(at, room));
                PendingRequest::start(async move {
                    reading.await?;
                    Ok(Reply::Data(Data::copy_of(&vec![0xff; len as usize])))
                })
            }
            (Hinting::TakesLateRoomAtOnce, Op::Read(room)) => {
                let mut buf = room.into_buf();
                let reading = self
                    .below
                    .submit(Request::read(at, blockhaul_io::Reservation::unpooled(buf.len())));
                PendingRequest::start(async move {
                    if let Reply::Data(data) = reading.await? {
                        buf.copy_from_slice(data.bytes());
                    }
                    Ok(Reply::Data(buf.into()))
                })
            }
            (Hinting::LooksAtParkedPayloads, Op::Write(data)) => {
                let data = Data::copy_of(data.bytes());
                self.below.submit(Request::write(at, data).with(flags))
            }
            (Hinting::LosesParkedPayloads, Op::Write(data)) if data.is_parked() => {
                PendingRequest::ready(Ok(Reply::Done))
            }
            (Hinting::AnswersTheFirstContextOnly, Op::Extents(_)) => {
                let first = blockhaul_block::ContextSet::first();
                self.below.submit(Request::extents(at, len, first).with(flags))
            }
            (_, op) => self.below.submit(Request { op, at, len, flags }),
        }
    }
}

#[test]
fn layers_that_break_what_they_promise_are_found() {
    const ZEROED: &str = "a_zeroed_device_reads_as_zeroes";
    const LATE: &str = "late_room_has_its_memory_with_the_answer";
    const PARKED: &str = "a_parked_payload_is_written_unseen";
    const CONTEXTS: &str = "every_context_is_answered";
    let checks = vec![ZEROED, LATE, PARKED, CONTEXTS];
    for (how, found) in [
        (Hinting::Honours, None),
        (Hinting::ZeroesAreOnes, Some(ZEROED)),
        (Hinting::TakesLateRoomAtOnce, Some(LATE)),
        (Hinting::LooksAtParkedPayloads, Some(PARKED)),
        (Hinting::LosesParkedPayloads, Some(PARKED)),
        (Hinting::AnswersTheFirstContextOnly, Some(CONTEXTS)),
    ] {
        let options = ConformOptions { only: checks.clone(), ..quick() };
        let report = conform::run(&format!("{how:?}"), options, move || async move {
            let model = Model::with_facts(Model::hinting_facts(1 << 20));
            let below = ModelDevice::new(model, CompletionOrder::Immediate);
            let layer = Arc::new(Layer2 { how, below: below.clone() });
            Ok(Subject::new(layer).over(below))
        });
        match found {
            Some(check) => assert!(report.failed(check), "{how:?}: {report:?}"),
            None => assert_eq!(report.failures().count(), 0, "{report:?}"),
        }
    }
}
