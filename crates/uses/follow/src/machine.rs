//! The states of a move, without I/O.

use serde::{Deserialize, Serialize};

use crate::error::{FollowError, FollowErrorKind};
use crate::limits::{FollowLimits, VerifyScope};
use crate::prediction::{CopyFigures, RoundFigures, link_model, predict};
use crate::protocol::{EPOCH_MAX, Operation, ProviderRequest, RequestedDisk, RoundOffer, VERSION};

/// Attempts of a round whose connections are lost.
const ATTEMPTS: u32 = 5;
/// Seconds after which a prediction is not needed.
const LONGEST_HOLD: f64 = 1e7;
/// A round is not shorter than the one before if it has more than this part of its bytes.
const SHORTER: f64 = 0.9;

/// Steps of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FollowPhase {
    /// Rounds of changes, while the machine runs.
    Rounds,
    /// Waiting for the cut-over.
    Holding,
    /// The machine is being stopped.
    Stopping,
    /// The last round.
    LastRound,
    /// Source and target are compared.
    Verifying,
    /// The machine is being started at its new place.
    Starting,
    /// The provider removes what it has made.
    Ending,
    /// Everything is done.
    Complete,
}

/// What is known about a disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FollowedDisk {
    /// Its name.
    pub name: String,
    /// Its bytes, once a provider has said them.
    pub size: Option<u64>,
    /// The point in time that the target has, completely.
    pub epoch: Option<String>,
    /// All epochs that were copied.
    pub epochs: Vec<String>,
    /// Why the next round must be a full one.
    pub doubt: Option<String>,
    /// Bytes that the interrupted round since `epoch` selected, which a later list has, too.
    pub selected: Option<u64>,
}

/// The state of a move, as it is kept in a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FollowState {
    /// The step.
    pub phase: FollowPhase,
    /// The rounds that are complete.
    pub rounds: Vec<RoundFigures>,
    /// The disks, in the order of the plan.
    pub disks: Vec<FollowedDisk>,
    /// The point in time of the round that is being copied.
    pub offers: Option<Vec<RoundOffer>>,
    /// Seconds that its provider took.
    pub make_seconds: f64,
    /// When the provider was asked for it, in seconds since 1970.
    pub asked: f64,
    /// When the provider was asked for the last complete one.
    pub epoch_time: Option<f64>,
    /// The predicted downtime at the cut-over.
    pub predicted: Option<f64>,
    /// When the command that stops the machine was begun.
    pub stopping: Option<f64>,
    /// When the machine had been stopped.
    pub stopped: Option<f64>,
    /// When the last round was verified.
    pub verified: Option<f64>,
    /// When it had been started at its new place.
    pub started: Option<f64>,
}

/// A disk that is copied in a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundCopy {
    /// The index of the disk in the plan.
    pub disk: usize,
    /// Its point in time.
    pub offer: RoundOffer,
    /// Why all of it is copied; `None`: what the offer lists.
    pub full: Option<String>,
    /// Machine is stopped, and what is written is read again.
    pub last: bool,
}

/// What is to be done next.
#[derive(Debug, Clone, PartialEq)]
pub enum FollowAction {
    /// Send this request to the provider.
    MakeRound(ProviderRequest),
    /// Copy these disks.
    CopyRound(Vec<RoundCopy>),
    /// Wait for the cut-over, at most up to this time in seconds since 1970: then another round is due.
    Hold(Option<f64>),
    /// Run the command that stops the machine.
    Stop,
    /// Compare all of these disks with their targets, if the plan wants that.
    Verify(Vec<RoundCopy>),
    /// Run the command that starts the machine.
    Start,
    /// Have the provider remove what it has made.
    End(ProviderRequest),
    /// Nothing.
    Complete,
}

/// A move.
#[derive(Debug, Clone, PartialEq)]
pub struct FollowMachine {
    machine: String,
    limits: FollowLimits,
    state: FollowState,
    attempts: u32,
    /// An interrupted round may go on, if its point in time is still there.
    resumes: bool,
}

impl FollowMachine {
    /// A move of a machine with these disks.
    pub fn new(machine: &str, disks: &[String], limits: FollowLimits) -> FollowMachine {
        let disk = |name: &String| FollowedDisk {
            name: name.clone(),
            size: None,
            epoch: None,
            epochs: Vec::new(),
            doubt: None,
            selected: None,
        };
        let state = FollowState {
            phase: FollowPhase::Rounds,
            rounds: Vec::new(),
            disks: disks.iter().map(disk).collect(),
            offers: None,
            make_seconds: 0.0,
            asked: 0.0,
            epoch_time: None,
            predicted: None,
            stopping: None,
            stopped: None,
            verified: None,
            started: None,
        };
        FollowMachine { machine: machine.into(), limits, state, attempts: 0, resumes: false }
    }

    /// A move that was interrupted in this state. The round that was being copied begins with the provider again, which
    /// says whether its point in time is still there.
    ///
    /// # Errors
    /// If the state is one of other disks.
    pub fn resume(
        machine: &str,
        disks: &[String],
        limits: FollowLimits,
        mut state: FollowState,
        has_stop: bool,
    ) -> Result<FollowMachine, FollowError> {
        if !state.disks.iter().map(|disk| &disk.name).eq(disks) {
            return Err(FollowError::new(
                FollowErrorKind::State,
                "the state is one of other disks: use the plan with which the move began, or another state",
            ));
        }
        if matches!(state.phase, FollowPhase::LastRound | FollowPhase::Verifying) {
            // The machine may have been started where it was since then: it is stopped again, and the last round is
            // made of the disks as they are now.
            state.phase = if has_stop { FollowPhase::Stopping } else { FollowPhase::Holding };
            state.offers = None;
        }
        Ok(FollowMachine { state, resumes: true, ..FollowMachine::new(machine, disks, limits) })
    }

    /// The state, to be kept before the next action.
    pub fn state(&self) -> &FollowState {
        &self.state
    }

    /// Makes the next round of a disk a full one.
    pub fn doubt(&mut self, disk: usize, why: &str) {
        if self.state.disks[disk].epoch.is_some() {
            self.state.disks[disk].doubt.get_or_insert_with(|| why.to_string());
        }
    }

    fn is_last(&self) -> bool {
        self.state.phase == FollowPhase::LastRound
    }

    /// What to do next.
    pub fn next(&self) -> FollowAction {
        match self.state.phase {
            FollowPhase::Rounds | FollowPhase::LastRound => match &self.state.offers {
                Some(_) if !self.resumes => FollowAction::CopyRound(self.copies()),
                _ => FollowAction::MakeRound(self.request(Operation::Round)),
            },
            FollowPhase::Holding => FollowAction::Hold(self.next_round_at()),
            FollowPhase::Stopping => FollowAction::Stop,
            FollowPhase::Verifying => FollowAction::Verify(self.copies()),
            FollowPhase::Starting => FollowAction::Start,
            FollowPhase::Ending => FollowAction::End(self.request(Operation::End)),
            FollowPhase::Complete => FollowAction::Complete,
        }
    }

    fn request(&self, operation: Operation) -> ProviderRequest {
        let under_way = |index: usize| {
            let offers = self.state.offers.as_ref().filter(|_| self.resumes)?;
            Some(offers.get(index)?.epoch.clone())
        };
        let disk = |(index, disk): (usize, &FollowedDisk)| RequestedDisk {
            name: disk.name.clone(),
            since: disk.epoch.clone().filter(|_| disk.doubt.is_none()),
            resume: under_way(index),
        };
        ProviderRequest {
            version: VERSION,
            operation,
            machine: self.machine.clone(),
            round: self.state.rounds.len() as u32 + 1,
            last: self.state.phase > FollowPhase::Stopping,
            disks: self.state.disks.iter().enumerate().map(disk).collect(),
        }
    }

    fn copies(&self) -> Vec<RoundCopy> {
        let offers = self.state.offers.as_deref().unwrap_or_default();
        let copy = |(disk, offer): (usize, &RoundOffer)| RoundCopy {
            disk,
            offer: offer.clone(),
            full: full_reason(&self.state.disks[disk], offer),
            last: self.state.phase > FollowPhase::Stopping,
        };
        offers.iter().enumerate().map(copy).collect()
    }

    /// The provider has made a round. `asked`: when it was asked for it.
    ///
    /// # Errors
    /// If an offer is not possible.
    pub fn round_made(
        &mut self,
        mut offers: Vec<RoundOffer>,
        asked: f64,
        seconds: f64,
    ) -> Result<(), FollowError> {
        let index =
            |offer: &RoundOffer| self.state.disks.iter().position(|disk| disk.name == offer.disk);
        if let Some(other) = offers.iter().find(|offer| index(offer).is_none()) {
            return Err(FollowError::provider(format!(
                "the provider offers disk {:?}, which the plan does not have",
                other.disk
            )));
        }
        offers.sort_by_key(index);
        if offers.len() != self.state.disks.len()
            || offers.iter().zip(&self.state.disks).any(|(offer, disk)| offer.disk != disk.name)
        {
            return Err(FollowError::provider(
                "the provider must offer each disk of the plan once",
            ));
        }
        let mut sources: Vec<_> = offers.iter().map(|offer| &offer.source).collect();
        sources.sort_unstable();
        if let Some(twice) = sources.windows(2).find(|pair| pair[0] == pair[1]) {
            let text = format!("the provider offers {:?} as the source of two disks", twice[0]);
            return Err(FollowError::provider(text));
        }
        let before = self.state.offers.take();
        for (index, offer) in offers.iter().enumerate() {
            let resumed = before.as_ref().map(|before| &before[index]);
            self.check_offer(index, offer, resumed).map_err(|error| error.of_disk(&offer.disk))?;
        }
        // The time of a point that is offered again is that of the first offer.
        let is_same = before.as_ref().is_some_and(|before| {
            before.iter().zip(&offers).all(|(one, other)| one.epoch == other.epoch)
        });
        if !is_same {
            self.state.asked = asked;
        }
        self.state.offers = Some(offers);
        self.state.make_seconds = seconds;
        self.resumes = false;
        Ok(())
    }

    fn check_offer(
        &mut self,
        index: usize,
        offer: &RoundOffer,
        before: Option<&RoundOffer>,
    ) -> Result<(), FollowError> {
        let is_valid = |epoch: &str| !epoch.is_empty() && epoch.len() <= EPOCH_MAX;
        if !is_valid(&offer.epoch) {
            return Err(FollowError::provider(format!(
                "the name of an epoch has 1 to {EPOCH_MAX} bytes"
            )));
        }
        if offer.ranges.is_some() && offer.bitmap.is_some() {
            return Err(FollowError::provider("an offer has a list or a bitmap, not both"));
        }
        let disk = &mut self.state.disks[index];
        if let Some(size) = disk.size.filter(|&size| size != offer.size) {
            return Err(FollowError::provider(format!(
                "the disk has {} bytes, and had {size} before: begin a new move",
                offer.size
            )));
        }
        if disk.epochs.contains(&offer.epoch) {
            return Err(FollowError::provider(format!(
                "epoch {:?} was copied before: the provider must make a new point in time for each round",
                offer.epoch
            )));
        }
        if offer.since.as_ref() == Some(&offer.epoch) {
            return Err(FollowError::provider("an epoch cannot begin at itself"));
        }
        if let Some(before) = before.filter(|before| before.epoch == offer.epoch)
            && before.since != offer.since
            && offer.since.is_some()
        {
            return Err(FollowError::provider(format!(
                "epoch {:?} was offered since {:?}, and now since {:?}",
                offer.epoch, before.since, offer.since
            )));
        }
        disk.size = Some(offer.size);
        Ok(())
    }

    /// Notes that the list of a disk selects this many bytes, before it is copied. A later list of changes since
    /// the same epoch has them, too: if it has less, all of the disk is copied.
    pub fn selected(&mut self, index: usize, bytes: u64) {
        let disk = &mut self.state.disks[index];
        if let Some(before) = disk.selected.filter(|&before| bytes < before) {
            let why = format!(
                "the list of changes has {bytes} bytes, and that of an interrupted round had {before}"
            );
            disk.doubt.get_or_insert(why);
        }
        disk.selected = disk.selected.max(Some(bytes));
    }

    /// All disks of the round are copied and durable.
    ///
    /// # Errors
    /// [`FollowErrorKind::NoConvergence`]: rounds do not get shorter. The round is complete all the same.
    pub fn round_copied(&mut self, copied: CopyFigures, now: f64) -> Result<(), FollowError> {
        let copies = self.copies();
        let full = |copy: &RoundCopy| Some((copy.offer.disk.clone(), copy.full.clone()?));
        let interval = self.state.epoch_time.map(|before| self.since(before, self.state.asked));
        let mut figures = RoundFigures {
            number: self.state.rounds.len() as u32 + 1,
            full: copies.iter().filter_map(full).collect(),
            bytes: copied.bytes,
            read: copied.read,
            make_seconds: self.state.make_seconds,
            copy_seconds: copied.seconds,
            interval,
            predicted: None,
            last: self.is_last(),
        };
        for copy in &copies {
            let disk = &mut self.state.disks[copy.disk];
            disk.epoch = Some(copy.offer.epoch.clone());
            disk.epochs.push(copy.offer.epoch.clone());
            disk.doubt = None;
            disk.selected = None;
        }
        self.attempts = 0;
        self.state.epoch_time = Some(self.state.asked);
        if self.is_last() {
            self.state.rounds.push(figures);
            self.state.phase = FollowPhase::Verifying;
            return Ok(());
        }
        self.state.offers = None;
        self.state.rounds.push(figures.clone());
        figures.predicted = self.predicted(now);
        if let Some(last) = self.state.rounds.last_mut() {
            last.predicted = figures.predicted;
        }
        let fits = figures.predicted.is_some_and(|seconds| seconds <= self.limits.downtime);
        if fits || self.is_limited(now) {
            self.state.phase = FollowPhase::Holding;
            return Ok(());
        }
        self.check_convergence()
    }

    fn is_limited(&self, now: f64) -> bool {
        self.state.rounds.len() as u32 >= self.limits.rounds
            || self.limits.until.is_some_and(|until| now >= until)
    }

    /// Refuses to go on if three increments did not get shorter.
    fn check_convergence(&self) -> Result<(), FollowError> {
        let increments = self.state.rounds.iter().rev().take_while(|round| round.is_increment());
        let bytes: Vec<_> = increments.take(3).map(|round| round.bytes as f64).collect();
        let [last, middle, first] = bytes[..] else { return Ok(()) };
        if last < SHORTER * middle || middle < SHORTER * first {
            return Ok(());
        }
        let Some(model) = link_model(&self.state.rounds) else { return Ok(()) };
        let predicted =
            self.state.rounds.last().and_then(|round| round.predicted).unwrap_or_default();
        let dirty = self.state.rounds.last().and_then(RoundFigures::dirty_rate).unwrap_or_default();
        let left = self.limits.downtime - model.cost;
        let link = if left > 0.0 {
            // All that is read, also for the verification.
            let bytes = (predicted - model.cost) * model.rate;
            format!("a link of {:.0} MB/s", (bytes / left).max(dirty) / 1e6)
        } else {
            format!("a provider that takes less than {:.1} s for a round", model.cost)
        };
        Err(FollowError::new(
            FollowErrorKind::NoConvergence,
            format!(
                "the rounds do not get shorter: the machine changes {:.1} MB/s, the link carries {:.1} MB/s, and a \
                 round costs {:.1} s besides: allow a downtime of {:.0} s, or use {link}; the machine still runs",
                dirty / 1e6,
                model.rate / 1e6,
                model.cost,
                predicted.ceil()
            ),
        ))
    }

    /// The predicted downtime in seconds, if the machine is stopped now.
    pub fn predicted(&self, now: f64) -> Option<f64> {
        let since = self.since(self.state.epoch_time?, now);
        predict(&self.state.rounds, since, self.verify_bytes())
    }

    /// The seconds between two times, the first of which is that of the last complete round. The clock may have been set:
    /// it is at least the time that the round took.
    fn since(&self, before: f64, now: f64) -> f64 {
        let last = self.state.rounds.last();
        let least = last.map_or(0.0, |round| round.make_seconds + round.copy_seconds);
        (now - before).max(least).max(1e-3)
    }

    /// Bytes of disks that are read again, besides those of the last round; `None`: not even those.
    fn verify_bytes(&self) -> Option<u64> {
        match self.limits.verify {
            VerifyScope::None => None,
            VerifyScope::Written => Some(0),
            VerifyScope::All => Some(
                self.state.disks.iter().filter_map(|disk| disk.size).fold(0, u64::saturating_add),
            ),
        }
    }

    /// When the predicted downtime exceeds the limit, so that another round is due.
    fn next_round_at(&self) -> Option<f64> {
        let epoch = self.state.epoch_time?;
        if self.is_limited(epoch) {
            return None;
        }
        let model = link_model(&self.state.rounds)?;
        let fits = |since: f64| {
            predict(&self.state.rounds, since, self.verify_bytes())
                .is_none_or(|seconds| seconds <= self.limits.downtime)
        };
        // The prediction grows with the time. A round each second would be no wait.
        let least = (4.0 * model.cost).max(1.0);
        let mut since = least;
        while fits(2.0 * since) {
            since *= 2.0;
            if since > LONGEST_HOLD {
                return None;
            }
        }
        Some(epoch + since)
    }

    /// A copy of the round has failed.
    ///
    /// # Errors
    /// The error, unless another attempt is due.
    pub fn copy_failed(&mut self, error: FollowError) -> Result<(), FollowError> {
        self.attempts += 1;
        if !error.is_transient() || self.attempts >= ATTEMPTS {
            return Err(error);
        }
        self.resumes = true;
        Ok(())
    }

    /// The cut-over is due.
    pub fn cut_over(&mut self, now: f64) {
        self.state.predicted = self.predicted(now);
        self.state.stopping = Some(now);
        self.state.phase = FollowPhase::Stopping;
    }

    /// Another round is due, while the cut-over is not.
    pub fn hold_expired(&mut self) {
        self.state.phase = FollowPhase::Rounds;
    }

    /// The machine is stopped.
    pub fn stopped(&mut self, now: f64) {
        self.state.stopped = Some(now);
        self.state.phase = FollowPhase::LastRound;
    }

    /// The disks are verified. `different`: the first disk that differs, and how.
    ///
    /// # Errors
    /// [`FollowErrorKind::Difference`]: the next run copies all of the disk again.
    pub fn verified(
        &mut self,
        different: Option<(usize, String)>,
        now: f64,
    ) -> Result<(), FollowError> {
        if let Some((index, why)) = different {
            let disk = &mut self.state.disks[index];
            disk.doubt = Some(format!("source and target differed: {why}"));
            let text = format!(
                "source and target differ: {why}: the changes of an earlier round were not all listed; the machine \
                 is stopped: start it where it was, or run the command again, which copies all of the disk"
            );
            let error = FollowError::new(FollowErrorKind::Difference, text).of_disk(&disk.name);
            self.state.phase = FollowPhase::LastRound;
            self.state.offers = None;
            return Err(error);
        }
        self.state.verified = Some(now);
        self.state.phase = FollowPhase::Starting;
        Ok(())
    }

    /// The machine was started at its new place.
    pub fn started(&mut self, now: f64) {
        self.state.started = Some(now);
        self.state.phase = FollowPhase::Ending;
    }

    /// The provider has removed what it had made.
    pub fn ended(&mut self) {
        self.state.phase = FollowPhase::Complete;
    }
}

/// Why all of the disk is copied from an offer.
fn full_reason(disk: &FollowedDisk, offer: &RoundOffer) -> Option<String> {
    let has_list = offer.ranges.is_some() || offer.bitmap.is_some();
    match (&disk.epoch, &disk.doubt, &offer.since) {
        (None, ..) => Some("it is the first round".into()),
        (_, Some(doubt), _) => Some(doubt.clone()),
        (Some(_), None, Some(since)) if disk.epoch.as_ref() != Some(since) => Some(format!(
            "the changes of the provider begin at epoch {since:?}, not at the one that the target has"
        )),
        (Some(_), None, None) => Some("the provider has no changes since the last epoch".into()),
        (Some(_), None, Some(_)) if !has_list => Some("the offer has no list and no bitmap".into()),
        _ => None,
    }
}
