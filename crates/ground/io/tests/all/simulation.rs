//! A simulation repeats itself by its seed, takes no time to wait, and finds tasks that hang.

use std::cell::Cell;
use std::io::{IoSliceMut, Write as _};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use blockhaul_io::simulation::{
    Faults, SimulatedMachine, SimulationError, SimulationReport, SimulationSettings, run,
};
use blockhaul_io::{
    Buf, Data, File, RecvWindow, Reservation, Stream, WorkerHandle, elapsed, now, offload, sleep,
    spawn, ticket,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

const HARSH: Faults = Faults {
    short: 300,
    stall: 300,
    socket_delay: Duration::from_millis(5),
    file_delay: Duration::from_millis(5),
    cut: 0,
    refuse: 0,
};

fn settings(seed: u64) -> SimulationSettings {
    let time = Duration::from_secs(100_000);
    SimulationSettings { seed, faults: HARSH, keep: None, time, steps: 1_000_000, log: 0 }
}

fn pair() -> (Stream, Stream) {
    let flags = SocketFlags::CLOEXEC;
    let (one, two): (OwnedFd, OwnedFd) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    (Stream::new(one).unwrap(), Stream::new(two).unwrap())
}

/// Sends 100,000 bytes; receives them on another worker. Returns whether the end came in between.
async fn talk() -> bool {
    let machine = SimulatedMachine::start(2).unwrap();
    let (ours, theirs) = pair();
    let sum = machine.workers()[1].spawn(move || async move {
        let mut sum = 0_u64;
        let mut bytes = [0; 1000];
        loop {
            match theirs.recv(&mut [IoSliceMut::new(&mut bytes)]).await {
                Ok(0) => return Some(sum),
                Ok(count) => sum += bytes[..count].iter().map(|byte| u64::from(*byte)).sum::<u64>(),
                Err(_) => return None,
            }
        }
    });
    let sent = machine.workers()[0].spawn(move || async move {
        for part in 0..100_u8 {
            if ours.send_all(&[part; 1000]).await.is_err() {
                return false;
            }
        }
        true
    });
    let sent = sent.await.unwrap();
    let sum = sum.await.unwrap();
    assert!(!sent || sum.is_none_or(|sum| sum == 99 * 100 / 2 * 1000), "{sum:?}");
    !sent || sum.is_none()
}

fn report(settings: &SimulationSettings) -> (bool, SimulationReport) {
    let (cut, report) = run(settings, talk);
    (cut.unwrap(), report)
}

#[test]
fn the_same_seed_gives_the_same_events_and_another_one_others() {
    let traces: Vec<u64> = (0..20).map(|seed| report(&settings(seed)).1.trace).collect();
    for (seed, trace) in (0..).zip(&traces) {
        assert_eq!(report(&settings(seed)).1.trace, *trace, "seed {seed}");
    }
    assert!(traces.windows(2).all(|pair| pair[0] != pair[1]));
}

#[test]
fn cuts_are_chosen_by_seed_and_can_be_left_out() {
    let mut cuts = 0;
    for seed in 0..40 {
        let faults = Faults { cut: 300, ..HARSH };
        let settings = SimulationSettings { faults, ..settings(seed) };
        let (cut, first) = report(&settings);
        assert_eq!(cut, !first.chosen.is_empty(), "seed {seed}: {:?}", first.chosen);
        cuts += u64::from(cut);
        let (cut, without) = report(&SimulationSettings { keep: Some(Vec::new()), ..settings });
        assert!(!cut && without.chosen.is_empty(), "seed {seed}");
    }
    assert!((5..40).contains(&cuts), "{cuts}");
}

#[test]
fn a_day_passes_in_no_time_and_timers_fire_in_order() {
    let begun = Instant::now();
    let (passed, report) = run(&settings(1), || async {
        let begun = now();
        let order = Rc::new(Cell::new(0));
        let late = order.clone();
        drop(spawn(async move {
            sleep(Duration::from_secs(3600)).await;
            assert_eq!(late.replace(1), 0);
        }));
        sleep(Duration::from_secs(86_400)).await;
        assert_eq!(order.get(), 1);
        elapsed(begun)
    });
    assert!((86_400..86_401).contains(&passed.unwrap().as_secs()));
    assert!(report.panics.is_empty(), "{:?}", report.panics);
    assert!(begun.elapsed() < Duration::from_secs(60));
}

#[test]
fn what_can_never_end_is_reported() {
    let (stuck, _) = run(&settings(1), || async {
        let (_completer, ticket) = ticket::<()>();
        let _ = ticket.await;
    });
    assert_eq!(stuck, Err(SimulationError::Idle));
    let (stuck, _) = run(&SimulationSettings { steps: 1000, ..settings(1) }, || async {
        loop {
            blockhaul_io::yield_now().await;
        }
    });
    assert_eq!(stuck, Err::<(), _>(SimulationError::Steps));
    let (stuck, report) = run(&settings(1), || async { panic!("as planned") });
    assert_eq!(
        (stuck, report.panics),
        (Err::<(), _>(SimulationError::Panic), vec!["as planned".into()])
    );
}

#[test]
fn files_and_blocking_calls_take_virtual_time() {
    let (passed, _) = run(&settings(3), || async {
        let mut temporary = tempfile::tempfile().unwrap();
        temporary.write_all(b"before").unwrap();
        let file = File::new(temporary.into());
        let begun = now();
        for at in 0..100 {
            file.write_all_at(Data::copy_of(b"after!"), at).await.unwrap();
        }
        let (read, buf) = file.read_exact_at(Buf::unpooled(6), 99).await;
        read.unwrap();
        assert_eq!(&buf[..], b"after!");
        assert_eq!(offload(|| std::thread::current().id()).await, Ok(std::thread::current().id()));
        elapsed(begun)
    });
    let passed = passed.unwrap();
    assert!(
        passed > Duration::from_millis(20) && passed < Duration::from_millis(600),
        "{passed:?}"
    );
}

#[test]
fn a_killed_machine_drops_its_tasks_even_if_they_hold_each_other() {
    struct Dropped(Rc<Cell<u32>>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    for seed in 0..20 {
        let (ended, report) = run(&settings(seed), || async {
            let machine = SimulatedMachine::start(2).unwrap();
            let (ours, theirs) = pair();
            let counted = machine.workers()[0].spawn(move || async move {
                let count = Rc::new(Cell::new(0));
                for _ in 0..3 {
                    let (completer, ticket) = ticket::<()>();
                    let dropped = Dropped(count.clone());
                    drop(spawn(async move {
                        // The task owns what would wake it.
                        let _ = ticket.await;
                        drop((completer, dropped));
                    }));
                }
                // A blocking call in flight.
                drop(offload(|| ()));
                let other = WorkerHandle::to(1).spawn(move || async move {
                    let _held = theirs;
                    sleep(Duration::from_secs(1 << 40)).await;
                });
                let _ = other.await;
            });
            sleep(Duration::from_secs(1)).await;
            machine.kill().await.unwrap();
            assert!(counted.await.is_err());
            let mut byte = [0];
            ours.recv(&mut [IoSliceMut::new(&mut byte)]).await.unwrap()
        });
        assert_eq!((ended, report.panics.len()), (Ok(0), 0), "seed {seed}: the peer sees the end");
    }
}

/// A readable socket may have nothing to give, several times, before the first byte of a payload that
/// takes several pipes: no pipe is passed over while it is empty.
#[test]
fn payloads_are_parked_in_order_although_the_socket_has_nothing_at_first() {
    const LEN: usize = (1 << 20) + 512;
    let bytes: Vec<u8> = (0..LEN).map(|i| (i * 7 + i / 251) as u8).collect();
    let mut parked = 0;
    for seed in 0..50 {
        let bytes = bytes.clone();
        let receive = || async move {
            let machine = SimulatedMachine::start(2).unwrap();
            let (ours, theirs) = pair();
            let sent = bytes.clone();
            machine.workers()[0].spawn(move || async move { ours.send_all(&sent).await.unwrap() });
            let received = machine.workers()[1].spawn(move || async move {
                let mut window = RecvWindow::new();
                let room = Reservation::unpooled(LEN).parkable();
                let data = window.payload_or_parked(&theirs, room).await.unwrap().unwrap();
                (data.is_parked(), data.bytes() == &bytes[..])
            });
            received.await.unwrap()
        };
        let (is_parked, same) = run(&settings(seed), receive).0.unwrap();
        assert!(same, "seed {seed}");
        parked += u64::from(is_parked);
    }
    assert!(parked > 0, "every payload was copied");
}
