//! A device that panics, in a program that does not abort then: one request or one connection
//! fails.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, Facts, PendingRequest, Request};
use blockhaul_server::Limits;
use blockhaul_testkit::model::CompletionOrder;
use blockhaul_wire::ReplyForm;

use crate::common::{Fixture, content, device, serve};

const SIZE: u64 = 1 << 20;
/// Requests here panic in the task that carries them out, or once that has waited.
const IN_TASK: u64 = 4096;
const LATER: u64 = 8192;
/// Requests here panic before they have started.
const AT_ONCE: u64 = 16384;

/// A faulty device.
struct Faulty(Arc<dyn Device>);

fn fault() {
    if std::hint::black_box(true) {
        panic!("a fault of the device");
    }
}

impl Device for Faulty {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let at = request.at;
        if at == AT_ONCE {
            fault();
        }
        let pending = self.0.submit(request);
        if at != IN_TASK && at != LATER {
            return pending;
        }
        PendingRequest::start(async move {
            if at == LATER {
                blockhaul_io::sleep(Duration::from_millis(5)).await;
            }
            fault();
            pending.await
        })
    }
}

fn faulty() -> Fixture {
    serve(Arc::new(Faulty(device(SIZE, CompletionOrder::Immediate))), Limits::default())
}

#[test]
fn a_request_whose_task_panics_fails_alone() {
    let fixture = faulty();
    let mut client = fixture.client(ReplyForm::Structured);
    for at in [IN_TASK, LATER, IN_TASK] {
        client.read(at, 512).unwrap_err();
        assert_eq!(client.read(0, 512).unwrap(), content(0, 512), "the connection goes on");
    }
    fixture.is_well();
    drop(client);
    assert_eq!(fixture.stop(Duration::from_secs(5)), 0);
}

#[test]
fn a_connection_whose_request_panics_ends_and_others_go_on() {
    let fixture = faulty();
    let mut other = fixture.client(ReplyForm::Structured);
    let mut client = fixture.client(ReplyForm::Structured);
    // The socket is shut down: this does not wait for a reply that never arrives.
    client.read(AT_ONCE, 512).unwrap_err();
    assert_eq!(other.read(0, 512).unwrap(), content(0, 512));
    fixture.wait_for_open(1);
    fixture.is_well();
    drop(other);
    assert_eq!(fixture.stop(Duration::from_secs(5)), 0);
}
