//! A failed flush is reported to every client of the storage, until the storage is opened again.

use std::sync::{Arc, Mutex};

use crate::common::{EINVAL, EIO, ENOSPC, Fixture, content, device, serve, serve_exports};
use blockhaul_block::{Can, Facts, Kind, OpKind};
use blockhaul_catalog::{Export, ExportClient, Exports, ListedExport, OpenFuture, Visit};
use blockhaul_server::Limits;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::until;
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, CommandFlags, ReplyForm};

const SIZE: u64 = 1 << 20;

fn faulty() -> Arc<FaultDevice> {
    FaultDevice::over(device(SIZE, CompletionOrder::Immediate), 1)
}

fn once(kind: Kind) -> FaultRule {
    FaultRule::new(FaultEffect::Fail(kind)).kind(OpKind::Flush).times(1)
}

fn flush(client: &mut Conversation) -> u32 {
    let request = client.request(CommandCode::Flush, 0, 0);
    client.ask(&request, &[]).unwrap().error
}

fn fua(client: &mut Conversation, command: CommandCode, at: u64) -> u32 {
    let request = client.request(command, at, 4096);
    let request = RequestHeader { flags: CommandFlags::FUA, ..request };
    let payload = if command == CommandCode::Write { vec![1; 4096] } else { Vec::new() };
    client.ask(&request, &payload).unwrap().error
}

fn two(fixture: &Fixture) -> (Conversation, Conversation) {
    (fixture.client(ReplyForm::Structured), fixture.client(ReplyForm::Simple))
}

// nbd: flags.multi-conn
#[test]
fn a_failed_flush_fails_the_flushes_of_all_connections_from_then_on() {
    for kind in [Kind::Io, Kind::NoSpace] {
        let faulty = faulty();
        faulty.add(once(kind));
        let fixture = serve(faulty.clone(), Limits::default());
        let (mut a, mut b) = two(&fixture);
        assert_eq!(a.write(0, &[1; 4096]).unwrap(), 0);
        assert_eq!(b.write(8192, &[2; 4096]).unwrap(), 0);
        assert_eq!(flush(&mut a), kind.number());
        assert_eq!(flush(&mut b), EIO, "what B wrote is lost, too");
        assert_eq!(flush(&mut a), EIO, "a repetition proves nothing");
        drop((a, b));
        fixture.wait_for_open(0);
        // The device of this server stays open.
        let mut late = fixture.client(ReplyForm::Structured);
        assert_eq!(flush(&mut late), EIO);
        for command in [CommandCode::Write, CommandCode::WriteZeroes, CommandCode::Trim] {
            assert_eq!(fua(&mut late, command, 0), EIO, "{command:?}");
        }
        let seen = faulty.seen();
        let durable = |seen: &&blockhaul_testkit::model::RequestRecord| {
            seen.kind == OpKind::Flush || seen.flags.contains(blockhaul_block::RequestFlags::FUA)
        };
        assert_eq!(seen.iter().filter(durable).count(), 1, "the device is not asked again");
        // Requests without durability still work.
        assert_eq!(late.write(0, &[3; 512]).unwrap(), 0);
        assert_eq!(late.read(0, 512).unwrap(), [3; 512]);
    }
}

#[test]
fn a_failed_fua_request_counts_as_a_failed_flush_if_it_may_have_flushed() {
    let faulty = faulty();
    faulty.add(FaultRule::new(FaultEffect::FailAfter(Kind::Io)).kind(OpKind::Write).times(1));
    let fixture = serve(faulty, Limits::default());
    let (mut a, mut b) = two(&fixture);
    assert_eq!(fua(&mut a, CommandCode::Write, 0), EIO);
    assert_eq!(flush(&mut b), EIO);
}

#[test]
fn other_failures_leave_flushes_alone() {
    let mut facts = Model::all_facts(SIZE);
    facts.can -= Can::FUA;
    let model = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
    let faulty = FaultDevice::over(model, 1);
    faulty.add(FaultRule::new(FaultEffect::Fail(Kind::NoSpace)).range(4096..8192));
    // Its FUA is a write and a flush, so that it is known which one fails.
    let fixture = serve(blockhaul_block::emulate::emulate(faulty.clone()), Limits::default());
    let (mut a, mut b) = two(&fixture);
    assert_eq!(a.write(4096, &[1; 512]).unwrap(), ENOSPC, "a plain write");
    assert_eq!(fua(&mut a, CommandCode::Write, 4096), ENOSPC, "a write that was not flushed");
    assert_eq!(fua(&mut a, CommandCode::Write, SIZE - 512), ENOSPC, "behind the end");
    assert_eq!(fua(&mut a, CommandCode::Trim, SIZE - 512), EINVAL, "behind the end");
    assert_eq!((flush(&mut b), fua(&mut b, CommandCode::Write, 0)), (0, 0));
    // The flush of a FUA request.
    faulty.add(once(Kind::Io));
    assert_eq!(fua(&mut a, CommandCode::Write, 0), EIO);
    assert_eq!((flush(&mut b), fua(&mut b, CommandCode::Write, 0)), (EIO, EIO));
}

/// A second connection's flush succeeds on the device while the first one's is held there.
fn overlapping(then: Option<FaultRule>) -> (u32, u32) {
    let failing = faulty();
    if let Some(then) = then {
        failing.add(then);
    }
    let holding = FaultDevice::over(failing.clone(), 1);
    holding.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Flush).nth(1));
    let fixture = serve(holding.clone(), Limits::default());
    let (mut a, mut b) = two(&fixture);
    let [of_a, of_b] = [&mut a, &mut b].map(|client| client.request(CommandCode::Flush, 0, 0));
    a.send_request(&of_a, &[]).unwrap();
    until("A's flush is held", || holding.hanging() == 1);
    b.send_request(&of_b, &[]).unwrap();
    until("B's flush has reached the device", || failing.seen().len() == 1);
    fixture.settle();
    // The next reply to B is not that of its flush: its success has to wait for A's outcome.
    assert_eq!(b.read(0, 512).unwrap(), content(0, 512));
    holding.release();
    (a.receive_answer(&of_a).unwrap().error, b.receive_answer(&of_b).unwrap().error)
}

// nbd: flush.covers-completed
#[test]
fn a_success_counts_only_if_no_flush_that_overlaps_it_fails() {
    assert_eq!(overlapping(None), (0, 0));
    let second = FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Flush).nth(2);
    assert_eq!(overlapping(Some(second)), (EIO, EIO));
}

/// Storage that is opened for each client.
#[derive(Clone, Default)]
struct Opens {
    opened: Arc<Mutex<Vec<Arc<FaultDevice>>>>,
    /// The storage itself tracks failed flushes.
    stays: bool,
}

impl Exports for Opens {
    fn admit(&self, _client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let visit: Arc<dyn Visit> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(visit)))
    }
}

impl Visit for Opens {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn open(&self, name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        let facts = Facts { flush_failures_stay: self.stays, ..Model::all_facts(SIZE) };
        let model = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
        let device = FaultDevice::over(model, 1);
        self.opened.lock().unwrap().push(device.clone());
        let export = Export::own(name, blockhaul_block::fence(device));
        Box::pin(std::future::ready(Ok(Some(export))))
    }
}

fn named(fixture: &Fixture, export: &str) -> Conversation {
    let mut client = fixture.connect();
    client.open(export, ReplyForm::Structured).unwrap();
    client
}

#[test]
fn clients_of_an_export_share_its_failure_until_the_last_has_left() {
    let opens = Opens::default();
    let fixture = serve_exports(Arc::new(opens.clone()));
    let mut clients: Vec<_> = ["a", "a", "b"].map(|export| named(&fixture, export)).into();
    opens.opened.lock().unwrap()[0].add(once(Kind::Io));
    assert_eq!(clients.iter_mut().map(flush).collect::<Vec<_>>(), [EIO, EIO, 0]);
    drop(clients.remove(0));
    fixture.wait_for_open(2);
    assert_eq!(flush(&mut named(&fixture, "a")), EIO, "one of its clients is still there");
    drop(clients);
    fixture.wait_for_open(0);
    assert_eq!(flush(&mut named(&fixture, "a")), 0, "it was opened again");
}

#[test]
fn storage_that_keeps_account_itself_is_not_mixed_up_with_that_of_other_clients() {
    let opens = Opens { stays: true, ..Opens::default() };
    let fixture = serve_exports(Arc::new(opens.clone()));
    let mut clients: Vec<_> = ["a", "a"].map(|export| named(&fixture, export)).into();
    opens.opened.lock().unwrap()[0].add(once(Kind::Io));
    assert_eq!(clients.iter_mut().map(flush).collect::<Vec<_>>(), [EIO, 0]);
    assert_eq!(clients.iter_mut().map(flush).collect::<Vec<_>>(), [EIO, 0]);
}
