//! What a move needs of the world, and the loop that carries out the actions of the machine on it.

use serde::Serialize;

use crate::error::FollowError;
use crate::machine::{FollowAction, FollowMachine, FollowPhase, FollowState, RoundCopy};
use crate::prediction::{CopyFigures, RoundFigures};
use crate::protocol::{ProviderRequest, RoundOffer};

/// A machine that is moved, its disks and targets.
pub trait FollowPlatform {
    /// Seconds since 1970.
    fn now(&self) -> f64;

    /// Keeps the state for a later run.
    ///
    /// # Errors
    /// If it cannot be written.
    fn save(&mut self, state: &FollowState) -> Result<(), FollowError>;

    /// The reply of the provider to a request, and the seconds that it took.
    ///
    /// # Errors
    /// If it failed, or its reply is not complete.
    fn ask(&mut self, request: &ProviderRequest) -> Result<(Vec<RoundOffer>, f64), FollowError>;

    /// Targets that another program may have written to since the last round.
    fn changed_targets(&mut self) -> Vec<(usize, String)>;

    /// Bytes in the list of an offer; `None` if it has no list.
    ///
    /// # Errors
    /// If it cannot be read, or is not a complete list of the disk.
    fn selected(&mut self, copy: &RoundCopy) -> Result<Option<u64>, FollowError>;

    /// Copies these disks, durably.
    ///
    /// # Errors
    /// The first error.
    fn copy(&mut self, copies: &[RoundCopy]) -> Result<CopyFigures, FollowError>;

    /// Waits for the cut-over, at most up to this time. Whether it is due.
    ///
    /// # Errors
    /// If a signal requests the end.
    fn hold(&mut self, until: Option<f64>) -> Result<bool, FollowError>;

    /// Stops the machine.
    ///
    /// # Errors
    /// If the command fails.
    fn stop(&mut self) -> Result<(), FollowError>;

    /// Compares the disks with their targets. The first one that differs, and how.
    ///
    /// # Errors
    /// If a side cannot be read.
    fn verify(&mut self, copies: &[RoundCopy]) -> Result<Option<(usize, String)>, FollowError>;

    /// Starts the machine at its new place.
    ///
    /// # Errors
    /// If the command fails.
    fn start(&mut self) -> Result<(), FollowError>;

    /// Reports a round that is complete.
    fn round(&mut self, figures: &RoundFigures);

    /// Reports a step.
    fn phase(&mut self, phase: FollowPhase, predicted: Option<f64>);
}

/// The result of a move that is complete.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FollowResult {
    /// The rounds, with the last one.
    pub rounds: Vec<RoundFigures>,
    /// The predicted downtime in seconds, without the commands that stop and start the machine.
    pub predicted: Option<f64>,
    /// Seconds from the machine being stopped to its disks being verified.
    pub copied: f64,
    /// Seconds from the command that stops the machine to the end of the one that starts it.
    pub downtime: f64,
}

impl FollowResult {
    fn new(state: &FollowState) -> FollowResult {
        let seconds = |from: Option<f64>, to: Option<f64>| match (from, to) {
            (Some(from), Some(to)) => (to - from).max(0.0),
            _ => 0.0,
        };
        FollowResult {
            predicted: state.predicted,
            rounds: state.rounds.clone(),
            copied: seconds(state.stopped, state.verified),
            downtime: seconds(state.stopping, state.started),
        }
    }
}

/// Carries out a move up to its end, or up to an error: the same move can then be resumed from the state that was saved last.
///
/// # Errors
/// The first error that no other attempt resolves.
pub fn run_follow(
    machine: &mut FollowMachine,
    platform: &mut impl FollowPlatform,
) -> Result<FollowResult, FollowError> {
    let mut shown = None;
    loop {
        platform.save(machine.state())?;
        let phase = machine.state().phase;
        if shown != Some(phase) {
            platform.phase(phase, machine.predicted(platform.now()));
            shown = Some(phase);
        }
        let done = step(machine, platform);
        if let Err(error) = done {
            // What it says about the state, such as a doubt, applies to the next run. The error is the cause of both.
            let _ = platform.save(machine.state());
            return Err(error);
        }
        if machine.state().phase == FollowPhase::Complete {
            platform.save(machine.state())?;
            return Ok(FollowResult::new(machine.state()));
        }
    }
}

/// One action.
fn step(
    machine: &mut FollowMachine,
    platform: &mut impl FollowPlatform,
) -> Result<(), FollowError> {
    match machine.next() {
        FollowAction::MakeRound(request) => {
            let asked = platform.now();
            let (offers, seconds) = platform.ask(&request)?;
            machine.round_made(offers, asked, seconds)?;
            for (disk, why) in platform.changed_targets() {
                machine.doubt(disk, &why);
            }
        }
        FollowAction::CopyRound(copies) => {
            for copy in copies.iter().filter(|copy| copy.full.is_none()) {
                if let Some(bytes) = platform.selected(copy)? {
                    machine.selected(copy.disk, bytes);
                }
            }
            // A doubt makes a copy a full one.
            let FollowAction::CopyRound(copies) = machine.next() else { return Ok(()) };
            platform.save(machine.state())?;
            match platform.copy(&copies) {
                Err(error) => machine.copy_failed(error)?,
                Ok(figures) => {
                    let complete = machine.round_copied(figures, platform.now());
                    if let Some(figures) = machine.state().rounds.last() {
                        platform.round(figures);
                    }
                    complete?;
                }
            }
        }
        FollowAction::Hold(until) => {
            if platform.hold(until)? {
                machine.cut_over(platform.now());
            } else {
                machine.hold_expired();
            }
        }
        FollowAction::Stop => {
            platform.stop()?;
            machine.stopped(platform.now());
        }
        FollowAction::Verify(copies) => {
            let different = platform.verify(&copies)?;
            machine.verified(different, platform.now())?;
        }
        FollowAction::Start => {
            platform.start()?;
            machine.started(platform.now());
        }
        FollowAction::End(request) => {
            platform.ask(&request)?;
            machine.ended();
        }
        FollowAction::Complete => {}
    }
    Ok(())
}
