//! The fault layer follows its rules and fulfils the contract without them; the crash device loses
//! what may be lost and nothing else.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Can, Device, DeviceExt, Kind, OpKind, Request, RequestFlags, fence};
use blockhaul_catalog::OpenedDevice;
use blockhaul_io::{Data, IoEngine, Reservation, Runtime, RuntimeConfig};
use blockhaul_testkit::conform::{self, ConformOptions, Subject};
use blockhaul_testkit::crash::CrashDevice;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::Rng;

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce() -> F + Send + 'static) {
    let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Threads }).unwrap();
    runtime.block_on(test);
}

fn faulty(size: u64) -> (Arc<ModelDevice>, Arc<FaultDevice>, Arc<dyn Device>) {
    let model = ModelDevice::new(Model::new(size), CompletionOrder::Immediate);
    let faults = FaultDevice::over(model.clone(), 1);
    let device = fence(faults.clone());
    (model, faults, device)
}

#[test]
fn a_slow_and_disorderly_device_keeps_the_contract() {
    conform::check("fault", ConformOptions::default(), || async {
        let model = ModelDevice::new(Model::new(300_000), CompletionOrder::Immediate);
        let faults = FaultDevice::over(model, 7);
        faults.delay_up_to(Duration::from_micros(300));
        faults.reorder(20);
        Ok(faults as Arc<dyn Device>)
    });
    let latency = Duration::from_millis(5);
    let only = vec!["sixty_four_requests_are_at_work_at_once"];
    let options = ConformOptions { latency: Some(latency), only, ..ConformOptions::default() };
    conform::check("delay", options, move || async move {
        let model = ModelDevice::new(Model::new(300_000), CompletionOrder::Immediate);
        let faults = FaultDevice::over(model, 7);
        faults.add(FaultRule::new(FaultEffect::Delay(latency)));
        Ok(faults as Arc<dyn Device>)
    });
}

#[test]
fn rules_fail_what_they_are_for() {
    run(|| async {
        let (model, faults, device) = faulty(1 << 20);
        faults.add(FaultRule::new(FaultEffect::Fail(Kind::NoSpace)).kind(OpKind::Write).nth(2));
        faults
            .add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Read).range(4096..8192));
        let data = || Data::copy_of(&[1; 4096]);
        device.write(0, data()).await.unwrap();
        assert_eq!(device.write(4096, data()).await.unwrap_err().kind(), Kind::NoSpace);
        device.write(4096, data()).await.unwrap();
        device.read(0, 4096).await.unwrap();
        device.read(8192, 4096).await.unwrap();
        assert_eq!(device.read(0, 4097).await.unwrap_err().kind(), Kind::Io);
        assert_eq!(device.read(8191, 10).await.unwrap_err().kind(), Kind::Io);
        faults.heal();
        device.read(8191, 10).await.unwrap();
        assert_eq!(model.seen().len(), 5, "what failed did not reach the device");
        assert_eq!(faults.seen().len(), 8);
    });
}

#[test]
fn failures_may_come_after_the_effect_or_halfway() {
    run(|| async {
        let (model, faults, device) = faulty(8192);
        faults.add(FaultRule::new(FaultEffect::FailAfter(Kind::Io)).kind(OpKind::Write).times(1));
        faults.add(FaultRule::new(FaultEffect::FailHalfway(Kind::Io)).kind(OpKind::Write).times(1));
        device.write(0, Data::copy_of(&[1; 100])).await.unwrap_err();
        device.write(1000, Data::copy_of(&[2; 100])).await.unwrap_err();
        device.write(2000, Data::copy_of(&[3; 100])).await.unwrap();
        let bytes = model.bytes();
        assert_eq!(bytes[..101], [[1; 100].as_slice(), &[0]].concat());
        assert_eq!(bytes[1000..1100], [[2; 50], [0; 50]].concat());
        assert_eq!(bytes[2099], 3);
    });
}

#[test]
fn what_hangs_goes_on_when_released_and_what_is_lost_is_an_error() {
    run(|| async {
        let (model, faults, device) = faulty(8192);
        faults.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Write));
        faults.add(FaultRule::new(FaultEffect::HangAfter).kind(OpKind::Zero));
        faults.add(FaultRule::new(FaultEffect::Lose).kind(OpKind::Trim));
        let write = device.submit(Request::write(0, Data::copy_of(&[1; 10])));
        let zero = device.submit(Request::zero(100, 10));
        model.model().bytes_mut()[100..110].fill(9);
        let mut write = Box::pin(write);
        blockhaul_io::timeout(Duration::from_millis(5), &mut write).await.unwrap_err();
        assert_eq!((faults.hanging(), faults.in_flight(), faults.in_flight_max()), (2, 2, 2));
        assert_eq!(model.bytes()[..10], [0; 10]);
        assert_eq!(faults.release(), 2);
        write.await.unwrap();
        zero.await.unwrap();
        assert_eq!((model.bytes()[0], model.bytes()[100]), (1, 9));
        assert_eq!(device.trim(0, 1).await.unwrap_err().kind(), Kind::Disconnected);
        assert_eq!(faults.in_flight(), 0);
    });
}

#[test]
fn reads_overtake_each_other_by_seed() {
    run(|| async {
        let (_, faults, device) = faulty(8192);
        faults.reorder(30);
        let order = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        let mut tasks = Vec::new();
        for index in 0..20 {
            let pending = device.submit(Request::read(index, Reservation::unpooled(1)));
            let order = order.clone();
            tasks.push(blockhaul_io::spawn(async move {
                pending.await.unwrap();
                order.borrow_mut().push(index);
            }));
        }
        for task in tasks {
            task.await;
        }
        assert!(!order.borrow().is_sorted());
    });
}

fn crash_subject(can: Can, completion: CompletionOrder) -> (Arc<CrashDevice>, Subject) {
    let mut facts = Model::all_facts(200_000);
    facts.can = can;
    let device = CrashDevice::new(Model::with_facts(facts), completion);
    let opened = OpenedDevice { device: device.clone(), more: Some(device.clone()) };
    let shown = device.clone();
    (device, Subject::from(opened).durable(move || shown.durable()))
}

#[test]
fn durability_is_checked_where_it_can_be_seen() {
    for can in [Can::all(), Can::all() - Can::FUA, Can::all() - Can::MULTI_CONN] {
        for completion in
            [CompletionOrder::Immediate, CompletionOrder::Deferred, CompletionOrder::Shuffled(3)]
        {
            let name = format!("crash, {completion:?}, {can:?}");
            conform::check(&name, ConformOptions::default(), move || async move {
                Ok(crash_subject(can, completion).1)
            });
        }
    }
}

#[test]
fn flush_or_fua_without_effect_is_found() {
    let cases = [
        ("a_flush_makes_completed_writes_durable", true, Can::all()),
        ("a_flush_covers_all_handles", true, Can::all()),
        ("fua_is_durable_on_completion", false, Can::all()),
        // FUA is emulated by a flush, which has no effect.
        ("fua_is_durable_on_completion", true, Can::all() - Can::FUA),
    ];
    for (check, flush, can) in cases {
        let options = ConformOptions {
            only: vec![check],
            engines: vec![IoEngine::Threads],
            ..ConformOptions::default()
        };
        let report = conform::run("liar", options, move || async move {
            let (honest, _) = crash_subject(can, CompletionOrder::Immediate);
            let liar = if flush { honest.ignoring_flush() } else { honest.ignoring_fua() };
            let opened = OpenedDevice { device: liar.clone(), more: Some(liar) };
            Ok(Subject::from(opened).durable(move || honest.durable()))
        });
        assert!(report.failed(check), "{report:?}");
    }
}

#[test]
fn a_flush_covers_its_own_handle_only_without_multi_conn() {
    for (can, covered) in [(Can::all(), 7), (Can::all() - Can::MULTI_CONN, 0)] {
        run(move || async move {
            let (one, _) = crash_subject(can, CompletionOrder::Immediate);
            let two = one.handle();
            one.write(0, Data::copy_of(&[7; 512])).await.unwrap();
            two.flush().await.unwrap();
            assert_eq!(one.durable()[0], covered);
            one.flush().await.unwrap();
            assert_eq!(one.durable()[0], 7);
        });
    }
}

#[test]
fn a_power_cut_keeps_what_was_flushed_and_any_part_of_the_rest() {
    run(|| async {
        let mut outcomes = std::collections::BTreeSet::new();
        for seed in 0..60 {
            let device = CrashDevice::new(Model::new(8192), CompletionOrder::Immediate);
            device.write(0, Data::copy_of(&[1; 4096])).await.unwrap();
            device.flush().await.unwrap();
            device.write(512, Data::copy_of(&[2; 1024])).await.unwrap();
            let fua = Request::write(4096, Data::copy_of(&[3; 512])).with(RequestFlags::FUA);
            device.submit(fua).await.unwrap();
            let left = device.power_cut(seed);
            assert_eq!(left[..512], [1; 512]);
            assert_eq!(left[1536..4096], [1; 2560]);
            assert_eq!(left[4096..4608], [3; 512], "FUA");
            for sector in [512, 1024] {
                let byte = left[sector];
                assert!(byte == 1 || byte == 2);
                assert!(left[sector..sector + 512].iter().all(|&other| other == byte), "torn");
            }
            outcomes.insert((left[512], left[1024]));
            assert_eq!(device.read(0, 1).await.unwrap_err().kind(), Kind::Disconnected);
        }
        assert_eq!(outcomes.len(), 4, "all combinations come up: {outcomes:?}");
    });
}

#[test]
fn an_early_flush_does_not_cover_a_late_write() {
    run(|| async {
        for seed in 0..40 {
            let device = CrashDevice::new(Model::new(4096), CompletionOrder::Shuffled(seed));
            let write = device.submit(Request::write(0, Data::copy_of(&[5; 512])));
            // In flight together: the flush was submitted before the write had completed.
            let flush = device.submit(Request::flush());
            write.await.unwrap();
            flush.await.unwrap();
            let early = device.durable()[0];
            device.flush().await.unwrap();
            assert_eq!(device.durable()[0], 5);
            let mut rng = Rng::new(seed);
            let at_once = rng.below(40) == 0;
            assert_eq!(early, if at_once { 5 } else { 0 });
        }
    });
}
