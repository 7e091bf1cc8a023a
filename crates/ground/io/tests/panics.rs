//! A panic in a task fails only what waits for the task, unless the program chooses to abort.
//!
//! Apart from the other tests: it starts processes, which hold the sockets of simulations open for a moment.
#![allow(clippy::unwrap_used)]

use std::future::poll_fn;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::time::Duration;

use blockhaul_io::{LostCompletion, Runtime, RuntimeConfig, WorkerHandle};

fn runtime() -> Runtime {
    Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap()
}

/// Panics like a faulty device.
fn fault() {
    if std::hint::black_box(true) {
        panic!("a fault");
    }
}

#[test]
fn what_waits_for_a_task_that_panics_hears_that_it_got_lost() {
    runtime().block_on(|| async {
        for other in [0, 1] {
            let lost = WorkerHandle::to(other).spawn(|| async { fault() }).await;
            assert_eq!(lost, Err(LostCompletion), "worker {other}");
            let lost = WorkerHandle::to(other).spawn(|| async {
                blockhaul_io::sleep(Duration::from_millis(1)).await;
                fault();
            });
            assert_eq!(lost.await, Err(LostCompletion), "worker {other}, later");
        }
        for mut task in [
            blockhaul_io::start(async { fault() }),
            blockhaul_io::spawn(async { fault() }),
            blockhaul_io::start(async {
                blockhaul_io::yield_now().await;
                fault();
            }),
        ] {
            assert_eq!(poll_fn(|cx| task.poll_or_lost(cx)).await, Err(LostCompletion));
        }
    });
}

#[test]
fn other_tasks_of_the_worker_go_on() {
    runtime().block_on(|| async {
        let before = blockhaul_io::spawn(async {
            blockhaul_io::sleep(Duration::from_millis(5)).await;
            1
        });
        // More than one turn runs, each after one that panics.
        let tasks: Vec<_> = (0..1000)
            .map(|number| {
                drop(blockhaul_io::spawn(async { fault() }));
                blockhaul_io::spawn(async move { number })
            })
            .collect();
        for (number, task) in tasks.into_iter().enumerate() {
            assert_eq!(task.await, number);
        }
        assert_eq!(before.await, 1);
    });
}

#[test]
fn who_runs_a_future_that_panics_panics() {
    let runtime = runtime();
    let run = std::panic::AssertUnwindSafe(|| runtime.block_on(|| async { fault() }));
    assert!(std::panic::catch_unwind(run).is_err());
    assert_eq!(runtime.block_on(|| async { 7 }), 7);
}

/// Runs alone, in its own process.
#[test]
#[ignore = "ends its process: started by the test below"]
fn a_program_that_wants_it_ends() {
    blockhaul_io::abort_on_panic();
    runtime().block_on(|| async {
        // The task ends a moment before the process does.
        let _ = WorkerHandle::to(1).spawn(|| async { fault() }).await;
        blockhaul_io::sleep(Duration::from_secs(60)).await;
        std::process::exit(7);
    });
}

#[test]
fn a_panic_ends_a_program_that_wants_it() {
    let words = ["--ignored", "--exact", "a_program_that_wants_it_ends", "--nocapture"];
    let output = Command::new(std::env::current_exe().unwrap()).args(words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(6), "{}: {said}", output.status);
    assert!(said.contains("internal error in a worker: a fault: stopping at once"), "{said}");
}
