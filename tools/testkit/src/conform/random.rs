//! Random requests compared with an array of bytes.

use std::ops::Range;
use std::sync::Arc;

use blockhaul_block::{Device, Kind, OpKind, Outcome, Reply, RequestFlags, ZERO};

use super::case::{CheckCase, read_bytes};
use super::verdict::{CheckResult, Verdict, skip_if};
use crate::arbitrary::{RandomStep, StepGenerator, shrink};

/// Maximum attempts to shorten a failing sequence: each is a separate run.
const SHRINK_TRIES: usize = 60;

/// The expected contents of the device in some places.
struct ExpectedContents {
    parts: Vec<ContentPart>,
    keeps: bool,
}

struct ContentPart {
    start: u64,
    bytes: Vec<u8>,
    /// False where a trim left the bytes undefined.
    known: Vec<bool>,
}

impl ContentPart {
    fn range(&self, range: &Range<u64>) -> Option<Range<usize>> {
        let from = usize::try_from(range.start.checked_sub(self.start)?).ok()?;
        let to = usize::try_from(range.end.checked_sub(self.start)?).ok()?;
        (to <= self.bytes.len()).then_some(from..to)
    }
}

impl ExpectedContents {
    async fn learn(case: &CheckCase) -> Result<ExpectedContents, String> {
        let mut parts = Vec::new();
        for window in case.windows() {
            let start = window.start;
            let bytes = case.read(window).await?;
            let known = vec![true; bytes.len()];
            parts.push(ContentPart { start, bytes, known });
        }
        Ok(ExpectedContents { parts, keeps: case.options.keeps_writes })
    }

    fn apply(&mut self, step: &RandomStep, failed: bool) {
        if !self.keeps || !step.kind.changes() {
            return;
        }
        let range = step.at..step.end();
        for part in &mut self.parts {
            let Some(range) = part.range(&range) else { continue };
            match step.kind {
                OpKind::Write => step.fill.fill(&mut part.bytes[range.clone()]),
                OpKind::Zero => part.bytes[range.clone()].fill(0),
                _ => {}
            }
            part.known[range].fill(step.kind != OpKind::Trim && !failed);
        }
    }

    fn compare(&self, at: u64, found: &[u8]) -> Result<(), String> {
        let range = at..at + found.len() as u64;
        for part in &self.parts {
            let Some(place) = part.range(&range) else { continue };
            // Most ranges are equal, and are compared at once.
            if found == &part.bytes[place.clone()] {
                continue;
            }
            let expected = part.bytes[place.clone()].iter().zip(&part.known[place]);
            let wrong = found
                .iter()
                .zip(expected)
                .position(|(found, (byte, known))| *known && found != byte);
            if let Some(index) = wrong {
                let offset = at + index as u64;
                let byte = part.bytes[(offset - part.start) as usize];
                let found = found[index];
                return Err(format!("byte {offset} is {found:#04x} instead of {byte:#04x}"));
            }
        }
        Ok(())
    }

    /// Whether a range may be reported as zero.
    fn may_be_zero(&self, range: Range<u64>) -> Result<(), String> {
        for part in &self.parts {
            let Some(place) = part.range(&range) else { continue };
            let bytes = part.bytes[place.clone()].iter().zip(&part.known[place]);
            let mut bytes = bytes.zip(range.start..);
            if let Some(((byte, _), at)) = bytes.find(|((byte, known), _)| **known && **byte != 0) {
                return Err(format!("byte {at} is {byte:#04x}, but extents call it zero"));
            }
        }
        Ok(())
    }
}

/// Checks one reply; no request in flight at the same time overlaps its range.
fn check(
    case: &CheckCase,
    expected: &mut ExpectedContents,
    step: &RandomStep,
    outcome: Outcome,
) -> Result<(), String> {
    let reply = match outcome {
        Ok(reply) => reply,
        Err(error)
            if step.flags.contains(RequestFlags::FAST) && error.kind() == Kind::Unsupported =>
        {
            expected.apply(step, true);
            return Ok(());
        }
        Err(error) => return Err(format!("it failed: {error}")),
    };
    expected.apply(step, false);
    match (step.kind, reply) {
        (OpKind::Read, reply) => expected.compare(step.at, &read_bytes(reply, step.payload())?),
        (OpKind::Extents, Reply::Extents(lists)) => {
            let asked = case.facts.all_contexts().count();
            if lists.len() != asked {
                return Err(format!("{} lists for {asked} contexts", lists.len()));
            }
            if step.flags.contains(RequestFlags::ONE_EXTENT)
                && lists.iter().any(|list| list.len() != 1)
            {
                return Err("more than one extent".to_string());
            }
            for (at, run) in lists[0].ranges(step.at) {
                if run.state & ZERO != 0 {
                    expected.may_be_zero(at..at + run.len)?;
                }
            }
            Ok(())
        }
        (OpKind::Extents, reply) => Err(format!("extents were answered by {reply:?}")),
        (_, Reply::Done) => Ok(()),
        (_, reply) => Err(format!("it was answered by {reply:?}")),
    }
}

/// Runs a sequence; an error says at which step it went wrong.
async fn play(
    case: &CheckCase,
    device: &Arc<dyn Device>,
    steps: &[RandomStep],
) -> Result<(), String> {
    let mut expected = ExpectedContents::learn(case).await?;
    let contexts = case.facts.all_contexts();
    let mut index = 0;
    while index < steps.len() {
        let together = steps[index + 1..].iter().take_while(|step| step.together).count();
        let group = &steps[index..=index + together];
        let mut out: Vec<_> = Vec::new();
        for step in group {
            out.push((step, device.submit(step.request(contexts))));
        }
        case.shuffle(&mut out);
        for (step, pending) in out {
            let outcome = case.wait(pending, &format!("{step:?}")).await?;
            check(case, &mut expected, step, outcome)
                .map_err(|text| format!("{step:?}: {text}"))?;
        }
        index += group.len();
    }
    for part in &expected.parts {
        let end = part.start + part.bytes.len() as u64;
        let found = case.read(part.start..end).await?;
        expected.compare(part.start, &found).map_err(|text| format!("at the end: {text}"))?;
    }
    Ok(())
}

/// All sentences together: random requests, many at a time, do what an array of bytes would do.
pub(super) async fn random_requests_match_the_model(case: CheckCase) -> CheckResult {
    let windows = case.windows();
    skip_if!(windows.is_empty(), "the device is empty");
    for round in 0..case.options.rounds {
        let seed = case.seed.wrapping_add(round as u64);
        let mut generator = StepGenerator::new(&case.facts, seed).windows(windows.clone());
        if round % 3 == 2 {
            // A small range, where requests conflict more often.
            let first = &windows[0];
            let narrow = first.start..first.end.min(first.start + case.up(12_000));
            generator = generator.windows(vec![narrow]).len_max(case.up(700));
        }
        let steps = generator.steps(case.options.steps);
        let Err(failure) = play(&case, &case.device, &steps).await else { continue };
        let count = steps.len();
        if failure.contains("did not complete") {
            // Each shorter sequence could take as long as this one did.
            return Err(format!("round {round} of {count} steps: {failure}"));
        }
        let mut last = failure.clone();
        let shorter = shrink(steps, SHRINK_TRIES, async |steps: &[RandomStep]| {
            match play(&case, &case.device, steps).await {
                Ok(()) => false,
                Err(failure) => {
                    last = failure;
                    true
                }
            }
        })
        .await;
        return Err(format!(
            "round {round} of {count} steps: {failure}; {} steps are enough: {last}\n    {shorter:?}",
            shorter.len()
        ));
    }
    Ok(Verdict::Held)
}
