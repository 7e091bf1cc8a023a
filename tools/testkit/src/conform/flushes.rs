//! Sentence 11: how a layer handles a failed flush below.

use std::ops::Range;
use std::time::Duration;

use blockhaul_block::{Can, Device, Kind, OpKind, Request, RequestFlags};
use blockhaul_io::Data;

use super::case::CheckCase;
use super::verdict::{CheckResult, Verdict, ensure, skip_if};
use crate::fault::{FaultDevice, FaultEffect, FaultRule};
use crate::model::RequestRecord;

/// Time in which a layer might repeat a request in the background.
const BACKGROUND: Duration = Duration::from_millis(50);

/// The flushes and FUA requests among those that a device has received.
fn durable(below: &FaultDevice, which: Range<usize>) -> Vec<RequestRecord> {
    let mut seen = below.seen()[which].to_vec();
    seen.retain(|seen| seen.kind == OpKind::Flush || seen.flags.contains(RequestFlags::FUA));
    seen
}

/// Writes data that is not durable yet.
async fn write(case: &CheckCase) -> Result<(), String> {
    match case.places(1, 4096).pop() {
        Some(place) => case.write(place.start, &case.noise(place.end - place.start)).await,
        None => Ok(()),
    }
}

/// Requests that make earlier writes durable, or fail to.
fn requests(case: &CheckCase) -> Vec<Request> {
    let mut requests = vec![Request::flush()];
    if let Some(place) = case.places(1, 4096).pop().filter(|_| case.can(Can::FUA)) {
        let bytes = case.noise(place.end - place.start);
        requests.push(Request::write(place.start, Data::copy_of(&bytes)).with(RequestFlags::FUA));
    }
    requests
}

async fn fails(
    case: &CheckCase,
    device: &dyn Device,
    request: Request,
    why: &str,
) -> Result<(), String> {
    let kind = request.kind();
    let outcome = case.wait(device.submit(request), "a request that is to fail").await?;
    ensure!(outcome.is_err(), "a {kind} succeeds {why}");
    Ok(())
}

/// 11. A layer passes the failure of a flush on and does not repeat the flush: the device below, like
///     the kernel, reports it once.
pub(super) async fn a_failed_flush_is_reported_and_not_repeated(case: CheckCase) -> CheckResult {
    let Some(below) = case.subject.below.clone() else {
        return Ok(Verdict::Skipped("no flush can be made to fail below".to_string()));
    };
    skip_if!(!case.keeps() || !case.can(Can::FLUSH), "nothing is written and flushed");
    let mut reached = false;
    for request in requests(&case) {
        write(&case).await?;
        let before = below.seen().len();
        let failures = below.failures().len();
        let kind = request.kind();
        below.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).durable().times(1));
        let outcome = case.wait(case.device.submit(request), "a request that is to fail").await?;
        blockhaul_io::sleep(BACKGROUND).await;
        below.heal();
        let Some(failed) = below.failures().get(failures).copied() else { continue };
        reached = true;
        ensure!(outcome.is_err(), "a {kind} succeeds whose flush has failed below");
        let until = durable(&below, before..failed);
        for one in durable(&below, failed..below.seen().len()) {
            let same = |other: &RequestRecord| {
                (other.kind, other.at, other.len) == (one.kind, one.at, one.len)
            };
            ensure!(!until.iter().any(same), "a {} was repeated that failed below", one.kind);
        }
    }
    skip_if!(!reached, "the layer does not flush below");
    Ok(Verdict::Held)
}

/// 11. While flushes and FUA requests fail below, as they do once one of them has failed, none
///     succeeds above, on any handle.
pub(super) async fn no_flush_succeeds_while_those_below_fail(case: CheckCase) -> CheckResult {
    let Some(below) = case.subject.below.clone() else {
        return Ok(Verdict::Skipped("no flush can be made to fail below".to_string()));
    };
    skip_if!(!case.keeps() || !case.can(Can::FLUSH), "nothing is written and flushed");
    let other = case.another().await?;
    write(&case).await?;
    below.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).durable());
    for first in requests(&case) {
        let kind = first.kind();
        let failures = below.failures().len();
        let outcome = case.wait(case.device.submit(first), "a request that is to fail").await?;
        if below.failures().len() == failures {
            continue;
        }
        ensure!(outcome.is_err(), "a {kind} succeeds whose flush has failed below");
        for _ in 0..2 {
            for request in requests(&case) {
                fails(&case, &*case.device, request, "after a failed flush").await?;
            }
            if let Some(other) = &other {
                for request in requests(&case) {
                    fails(&case, &**other, request, "on another handle after a failed flush")
                        .await?;
                }
            }
        }
        return Ok(Verdict::Held);
    }
    Ok(Verdict::Skipped("the layer does not flush below".to_string()))
}
