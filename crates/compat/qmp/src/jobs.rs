//! Jobs, as the monitor protocol begins, shows and controls them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::{Can, Compression, Device};
use blockhaul_catalog::Stack;
use blockhaul_jobs::{
    AtOnce, Begin, CopyMode, Ending, First, Happened, Item, Job, JobError, OnError, Settings,
    Source, Taken, To, Verb, WITHIN, WantedJobs, WantedMirror,
};
use blockhaul_snapshot::{Options, Trim};
use blockhaul_transfer::NamedOption;
use serde_json::{Map, Value, json};

use crate::commands::{Arguments, needed, number, switch, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::nodes::{BARRIER, Found, is_well_formed, on_failure};
use crate::state::{Node, Use};

/// A backup that was checked.
pub struct Prepared {
    pub item: Item,
    pub uses: Use,
    /// What happens to bitmaps at its moment.
    pub at_once: Vec<AtOnce>,
}

/// A disk that a job reads or writes.
struct End {
    /// The node.
    name: String,
    found: Found,
    device: Arc<dyn Device>,
}

impl End {
    fn size(&self) -> u64 {
        self.device.facts().size
    }
}

impl Monitor {
    /// `blockdev-backup`.
    pub(crate) async fn backup(&self, arguments: &Arguments) -> Result<()> {
        let Prepared { item, uses, at_once } = self.prepare_backup(arguments).await?;
        self.begin(WantedJobs { disks: vec![item], grouped: true, at_once }, vec![uses]).await
    }

    /// Begins checked backups.
    pub(crate) async fn begin(&self, wanted: WantedJobs, uses: Vec<Use>) -> Result<()> {
        self.note_uses(&uses);
        let begun = self.jobs.backup(&self.table, wanted).await;
        if begun.is_err() {
            let ours = |one: &Use| uses.iter().any(|other| other.job == one.job);
            self.state().uses.retain(|one| !ours(one));
        }
        begun?;
        Ok(())
    }

    /// Notes what jobs use that are about to begin, and forgets what those that have ended used.
    fn note_uses(&self, uses: &[Use]) {
        let mut state = self.state();
        let jobs = &self.jobs;
        state.uses.retain(|one| jobs.named(&one.job).is_some_and(|job| !job.status().is_over()));
        state.uses.extend(uses.iter().cloned());
    }

    /// Checks the arguments of a backup. Nothing has begun.
    pub(crate) async fn prepare_backup(&self, arguments: &Arguments) -> Result<Prepared> {
        let (source, target) = self.ends(arguments).await?;
        let settings = self.settings(arguments)?;
        let bitmap = BitmapUse::of(arguments)?;
        if source.size() != target.size() {
            return Err(QmpError::generic("Source and target image have different sizes"));
        }
        if settings.compress && !can_compress(&target) {
            let text = format!("Compression is not supported for this drive {}", target.name);
            return Err(QmpError::generic(text));
        }
        let mut at_once: Vec<AtOnce> = Vec::new();
        let name = needed(arguments, "bitmap");
        let live = match bitmap {
            BitmapUse::None => None,
            _ => Some(self.free_bitmap(&source.name, name).await.map_err(|error| {
                if error == QmpError::no_bitmap(name) {
                    QmpError::generic(format!("Bitmap '{name}' could not be found"))
                } else {
                    error
                }
            })?),
        };
        let uses = Use {
            job: settings.name.clone().unwrap_or_default(),
            source: source.name.clone(),
            target: target.name.clone(),
            bitmap: live.as_ref().map(|bitmap| bitmap.name().to_string()),
        };
        let clears = matches!(bitmap, BitmapUse::Selects { clears: true });
        let (export, source) = match &source.found {
            Found::Frozen(frozen) => {
                let taken = live.map(Taken::later);
                let shown = taken.iter().map(|taken| taken.dirty().clone()).collect();
                let view = self.view(frozen, shown).await?;
                if let Some(taken) = taken.clone() {
                    at_once.push(Box::new(move || taken.fill(clears)));
                }
                let given_back = taken.filter(|_| clears);
                (self.live_below(frozen).await?, Source::Still(view, given_back))
            }
            Found::Live(running) if !source.device.facts().can.contains(Can::WRITE) => {
                (running.clone(), Source::Still(source.device.clone(), None))
            }
            Found::Live(running) => {
                let bitmap = live.as_ref().map(|bitmap| bitmap.name().to_string());
                let begin = self.begin_of(arguments, &target, bitmap, clears);
                (running.clone(), Source::Now(begin))
            }
        };
        let item = Item {
            export,
            target: target_of(&target)?,
            options: copy_options(arguments),
            source,
            selects: uses.bitmap.clone(),
            settings,
            resumes: None,
        };
        Ok(Prepared { item, uses, at_once })
    }

    /// The point in time of a backup.
    fn begin_of(
        &self,
        arguments: &Arguments,
        target: &End,
        bitmap: Option<String>,
        clears: bool,
    ) -> Begin {
        let directory = self.node(&target.name);
        let directory = directory.filter(|node| node.filename.starts_with('/'));
        let directory = directory
            .and_then(|node| Path::new(&node.filename).parent().map(PathBuf::from))
            .filter(|directory| directory.is_dir());
        let options = Options {
            directory,
            // A write of the guest waits as long as it takes, as in QEMU.
            guest_timeout: std::time::Duration::ZERO,
            on_failure: on_failure(text(arguments, "on-cbw-error")),
            ..Options::default()
        };
        Begin { options, bitmap, clears, start: None, trim: Trim::Releases, within: BARRIER }
    }

    /// The source and the target of a job.
    async fn ends(&self, arguments: &Arguments) -> Result<(End, End)> {
        let source = needed(arguments, "device");
        let target = needed(arguments, "target");
        let source = self.end(source).await?;
        let target = self.end(target).await?;
        if source.name == target.name {
            return Err(QmpError::generic("Source and target cannot be the same"));
        }
        if let Some(kind) = self.user(&target.name) {
            return Err(QmpError::busy(&target.name, kind));
        }
        self.check_not_target(&self.disk_of(&source.found).await?)?;
        if !target.device.facts().can.contains(Can::WRITE) {
            return Err(QmpError::generic("Block node is read-only"));
        }
        let writers = self.state().exports.iter().any(|export| export.node == target.name);
        let served = self.running(&target.name).is_some_and(|running| running.served);
        if writers || served || matches!(target.found, Found::Frozen(_)) {
            let text = format!("Node '{}' is busy: it is exported to clients", target.name);
            return Err(QmpError::generic(text));
        }
        Ok((source, target))
    }

    async fn end(&self, name: &str) -> Result<End> {
        let found = self.find(name).await?;
        let (name, device) = match &found {
            Found::Live(running) => (self.node_of(running), running.device()),
            Found::Frozen(frozen) => (frozen.name.clone(), self.live_below(frozen).await?.device()),
        };
        let device = device.ok_or_else(|| QmpError::no_node(&name))?;
        Ok(End { name, found, device })
    }

    /// How a job is controlled.
    fn settings(&self, arguments: &Arguments) -> Result<Settings> {
        let device = needed(arguments, "device");
        // Without a name it has that of its device, if there is one; nodes have none.
        let is_device = self.devices().iter().any(|one| one.id == device);
        let fallback = if is_device { device } else { "" };
        let name = text(arguments, "job-id").unwrap_or(fallback);
        if !is_well_formed(name) {
            return Err(QmpError::generic(format!("Invalid job ID '{name}'")));
        }
        if self.jobs.named(name).is_some() {
            return Err(QmpError::generic(format!("Job ID '{name}' already in use")));
        }
        let policy = |name: &str| match text(arguments, name) {
            Some("auto") => OnError::Enospc,
            Some(text) => OnError::parse(text).unwrap_or_default(),
            None => OnError::Report,
        };
        Ok(Settings {
            name: Some(name.to_string()),
            finalized_by_hand: !switch(arguments, "auto-finalize", true),
            dismissed_by_hand: !switch(arguments, "auto-dismiss", true),
            on_source_error: policy("on-source-error"),
            on_target_error: policy("on-target-error"),
            speed: number(arguments, "speed").unwrap_or(0),
            compress: switch(arguments, "compress", false),
        })
    }

    /// `blockdev-mirror`.
    pub(crate) async fn mirror(&self, arguments: &Arguments) -> Result<()> {
        let sync = needed(arguments, "sync");
        let first = match (sync, text(arguments, "bitmap")) {
            ("full" | "top", None) => First::All,
            ("none", None) => First::Nothing,
            ("incremental" | "bitmap", Some(name)) => First::Dirty(name.to_string()),
            _ => return Err(QmpError::generic(format!("Sync mode '{sync}' not supported"))),
        };
        if text(arguments, "replaces").is_some() {
            return Err(QmpError::generic("Parameter 'replaces' is not supported"));
        }
        let (source, target) = self.ends(arguments).await?;
        let Found::Live(running) = &source.found else {
            return Err(QmpError::generic(format!("Node '{}' does not change", source.name)));
        };
        let settings = self.settings(arguments)?;
        if let First::Dirty(name) = &first {
            self.free_bitmap(&source.name, name).await?;
        }
        if source.size() != target.size() {
            return Err(QmpError::generic("Source and target image have different sizes"));
        }
        let uses = Use {
            job: settings.name.clone().unwrap_or_default(),
            source: source.name.clone(),
            target: target.name.clone(),
            bitmap: None,
        };
        let wanted = WantedMirror {
            export: running.clone(),
            target: target_of(&target)?,
            options: Vec::new(),
            within: BARRIER,
            first,
            copy_mode: copy_mode(arguments),
            settings,
            resumes: None,
        };
        let job = uses.job.clone();
        self.note_uses(&[uses]);
        let begun = self.jobs.mirror(&self.table, wanted).await;
        if begun.is_err() {
            self.state().uses.retain(|one| one.job != job);
        }
        begun?;
        Ok(())
    }

    /// Clients of a mirror have moved to its target: nodes and disks are the other way round.
    pub(crate) fn pivot(&self, job: &Job) {
        let uses = self.state().uses.iter().rfind(|one| one.job == job.name()).cloned();
        let Some(Use { source, target, .. }) = uses else { return };
        let (Some(from), Some(to)) = (self.running(&source), self.running(&target)) else { return };
        let old = job.mirror().and_then(|mirror| mirror.left());
        if let (Some((old, storage)), Some(shared)) = (old, to.shared.clone()) {
            let device = self.table.wanted().served(&old, to.write);
            *to.storage.lock().expect("no panic under this lock") = storage;
            *to.stack.lock().expect("no panic under this lock") = Some(old);
            if let Ok(device) = device {
                drop(blockhaul_io::spawn(async move {
                    let barrier = blockhaul_catalog::Barrier::None;
                    // It has no clients.
                    let _ = shared.switch().swap(device, barrier, async || Ok(())).await;
                }));
            }
        }
        from.claims.exchange(&from.owner, &to.owner);
        let mut state = self.state();
        state.moved.retain(|(node, _)| *node != source && *node != target);
        state.moved.push((source.clone(), to.name.clone()));
        state.moved.push((target.clone(), from.name.clone()));
        for export in &mut state.exports {
            if export.node == source {
                export.node.clone_from(&target);
                export.drive.clone_from(&target);
            }
        }
    }

    /// The job of this name, if it accepts the request.
    fn job(&self, name: &str, verb: Verb, is_block_job: bool) -> Result<Arc<Job>> {
        let found = self.jobs.named(name);
        let job = found.ok_or_else(|| {
            if is_block_job {
                QmpError::no_block_job(name)
            } else {
                QmpError::generic("Job not found")
            }
        })?;
        if !job.status().accepts(verb) {
            return Err(QmpError::generic(format!(
                "Job '{name}' in state '{}' cannot accept command verb '{}'",
                job.status().name(),
                verb.name()
            )));
        }
        Ok(job)
    }

    /// The same, also for jobs of an earlier server: a mirror can be resumed, every one dismissed.
    pub(crate) async fn control_any_job(&self, command: &str, arguments: &Arguments) -> Result<()> {
        let name = text(arguments, "id").or(text(arguments, "device")).unwrap_or_default();
        let found = self.jobs.named(name).filter(|job| job.resumable().is_some());
        match (found, command.trim_start_matches("block-")) {
            (Some(job), "job-resume") => self.resume_job(&job).await?,
            (Some(job), "job-dismiss" | "job-cancel") => {
                self.jobs.forget(&self.table, job.id()).await;
            }
            _ => self.control_job(command, arguments)?,
        }
        Ok(())
    }

    /// Continues a job of an earlier server; its target may be a node that has it open.
    async fn resume_job(&self, job: &Job) -> Result<()> {
        let resumed = self.jobs.resume(&self.table, job.id(), false).await?;
        let all = self.table.running();
        for job in resumed {
            let source = all.iter().find(|one| one.name == job.export());
            let target = all.iter().find(|one| !one.served && one.storage() == job.target());
            let (Some(source), Some(target)) = (source, target) else { continue };
            let uses = Use {
                job: job.name(),
                source: self.node_of(source),
                target: self.node_of(target),
                bitmap: None,
            };
            self.state().uses.push(uses);
        }
        Ok(())
    }

    /// The commands `job-*` and `block-job-*`.
    fn control_job(&self, command: &str, arguments: &Arguments) -> Result<()> {
        let block_job = command.strip_prefix("block-");
        let verb = block_job.unwrap_or(command);
        let name = text(arguments, "id").or(text(arguments, "device")).unwrap_or_default();
        let of = |verb| self.job(name, verb, block_job.is_some());
        match verb {
            "job-cancel" => {
                let job = of(Verb::Cancel)?;
                let soft = block_job.is_some() && !switch(arguments, "force", false);
                let is_ready = job.mirror().is_some_and(|mirror| mirror.is_ready());
                if soft && is_ready {
                    job.complete(Ending { within: WITHIN, switch: false });
                } else {
                    job.cancel();
                }
            }
            "job-complete" => {
                of(Verb::Complete)?.complete(Ending { within: WITHIN, switch: true });
            }
            "job-pause" => pause(&of(Verb::Pause)?)?,
            "job-resume" => resume(&of(Verb::Resume)?)?,
            "job-set-speed" => {
                let speed = number(arguments, "speed").unwrap_or(0);
                of(Verb::SetSpeed)?.limit(speed);
            }
            "job-change" => self.change_job(&*of(Verb::Change)?, arguments)?,
            "job-finalize" => of(Verb::Finalize)?.finalize(),
            "job-dismiss" => of(Verb::Dismiss)?.dismiss(),
            _ => {
                return Err(QmpError::no_command(format!(
                    "The command {command} has not been found"
                )));
            }
        }
        Ok(())
    }

    /// `block-job-change`: only a mirror's copy mode can change, as in QEMU from `background`.
    fn change_job(&self, job: &Job, arguments: &Arguments) -> Result<()> {
        let Some(mirror) = job.mirror() else {
            return Err(QmpError::generic("Job type does not support change"));
        };
        mirror.set_copy_mode(copy_mode(arguments));
        Ok(())
    }

    /// `query-jobs`.
    pub(crate) fn described_jobs(&self) -> Value {
        self.listed_jobs().iter().map(|job| described(job)).collect()
    }

    /// `query-block-jobs`.
    pub(crate) fn described_block_jobs(&self) -> Value {
        self.listed_jobs().iter().map(|job| described_as_block_job(job)).collect()
    }

    fn listed_jobs(&self) -> Vec<Arc<Job>> {
        let all = self.jobs.all();
        let null = blockhaul_jobs::Status::Null;
        all.into_iter().filter(|job| job.status() != null).collect()
    }

    /// Tells clients what has happened to a job.
    pub(crate) fn job_event(&self, job: &Job, happened: &Happened) {
        match happened {
            Happened::Status(status) => {
                let data = json!({ "id": job.name(), "status": status.name() });
                self.hub.tell("JOB_STATUS_CHANGE", data);
            }
            Happened::Ready => self.hub.tell("BLOCK_JOB_READY", numbers(job).into()),
            Happened::Pending => {
                let data = json!({ "id": job.name(), "type": job.kind() });
                self.hub.tell("BLOCK_JOB_PENDING", data);
            }
            Happened::Error { is_read, action, text } => {
                log::debug!("job {}: {text}", job.name());
                let operation = if *is_read { "read" } else { "write" };
                let data = json!({
                    "device": job.name(), "operation": operation, "action": action.name(),
                });
                self.hub.tell("BLOCK_JOB_ERROR", data);
            }
            Happened::Ended => self.job_has_ended(job),
        }
    }

    /// A job may have changed all of a node, unseen by its bitmaps.
    fn mark_target(&self, node: &str) {
        let Some(running) = self.running(node) else { return };
        running.bitmaps().iter().for_each(|bitmap| bitmap.set(0, bitmap.size()));
    }

    fn job_has_ended(&self, job: &Job) {
        let Some((error, cancelled)) = job.outcome() else { return };
        let target = self.state().uses.iter().rfind(|one| one.job == job.name()).cloned();
        if let Some(Use { target, .. }) = target {
            self.mark_target(&target);
        }
        let switches = job.mirror().is_some_and(|mirror| mirror.switches());
        if error.is_none() && switches {
            self.pivot(job);
        }
        let mut data = numbers(job);
        let event = match (error, cancelled) {
            (Some(_), true) => "BLOCK_JOB_CANCELLED",
            (Some(_), false) => {
                data.insert("error".to_string(), job.failure().map(JobError::facts).into());
                "BLOCK_JOB_COMPLETED"
            }
            (None, _) => "BLOCK_JOB_COMPLETED",
        };
        self.hub.tell(event, data.into());
    }
}

/// When the target of a mirror has what clients write.
fn copy_mode(arguments: &Arguments) -> CopyMode {
    text(arguments, "copy-mode").and_then(CopyMode::parse).unwrap_or_default()
}

/// What a backup does with a bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BitmapUse {
    None,
    /// It selects what is copied; `clears`: it is clean from then on, if the job succeeds.
    Selects {
        clears: bool,
    },
}

impl BitmapUse {
    fn of(arguments: &Arguments) -> Result<BitmapUse> {
        let sync = needed(arguments, "sync");
        let bitmap = text(arguments, "bitmap");
        let mode = text(arguments, "bitmap-mode");
        let wrong = |text: &str| Err(QmpError::generic(text));
        match (sync, bitmap, mode) {
            ("incremental" | "bitmap", None, _) => Err(QmpError::generic(format!(
                "must provide a valid bitmap name for '{sync}' sync mode"
            ))),
            (_, None, Some(_)) => wrong("Cannot specify bitmap sync mode without a bitmap"),
            ("none", ..) => wrong(
                "Sync mode 'none' not supported: use nodes of copy-before-write and snapshot-access",
            ),
            (_, None, None) => Ok(BitmapUse::None),
            ("incremental", _, None | Some("on-success")) => {
                Ok(BitmapUse::Selects { clears: true })
            }
            ("incremental", ..) => {
                wrong("Bitmap sync mode must be 'on-success' when using sync mode 'incremental'")
            }
            (_, _, None) => wrong("Bitmap sync mode must be given when providing a bitmap"),
            ("bitmap", _, Some(mode)) => Ok(BitmapUse::Selects { clears: mode != "never" }),
            (sync, _, Some("never")) => Err(QmpError::generic(format!(
                "Bitmap sync mode 'never' has no meaningful effect when combined with sync mode '{sync}'"
            ))),
            (sync, ..) => Err(QmpError::generic(format!(
                "Sync mode '{sync}' with a bitmap is not supported: add or clear a bitmap in the same \
                 transaction"
            ))),
        }
    }
}

/// The target of a job, as it is open.
fn target_of(end: &End) -> Result<To> {
    let Found::Live(running) = &end.found else { return Err(QmpError::no_node(&end.name)) };
    let stack: Option<Stack> = running.stack.lock().expect("no panic under this lock").clone();
    let stack = stack.ok_or_else(|| QmpError::no_node(&end.name))?;
    let spec = blockhaul_catalog::Spec::parse(running.storage().as_ref())?;
    Ok(To::Open(spec, stack, Some(running.clone())))
}

/// Whether the target of a job can store data compressed.
fn can_compress(end: &End) -> bool {
    let Found::Live(running) = &end.found else { return false };
    let stack = running.stack.lock().expect("no panic under this lock");
    let compression = stack.as_ref().map(|stack| stack.device().facts().compression);
    compression.unwrap_or_default() != Compression::None
}

/// Options of `copy` for `x-perf`.
fn copy_options(arguments: &Arguments) -> Vec<NamedOption> {
    let mut options = Vec::new();
    let tuning = arguments.get("x-perf").and_then(Value::as_object);
    let workers = tuning.and_then(|tuning| number(tuning, "max-workers"));
    if let Some(workers) = workers.filter(|workers| (1..=64).contains(workers)) {
        options.push(NamedOption::new("connections", 1));
        options.push(NamedOption::new("requests", workers));
    }
    options
}

fn pause(job: &Arc<Job>) -> Result<()> {
    use blockhaul_jobs::Status::{Paused, Standby};
    if matches!(job.status(), Paused | Standby) {
        return Err(QmpError::generic("Job is already paused"));
    }
    if job.pause(true) {
        Ok(())
    } else {
        Err(QmpError::generic("clients wait for the end of the job just now"))
    }
}

fn resume(job: &Arc<Job>) -> Result<()> {
    use blockhaul_jobs::Status::{Paused, Standby};
    if !matches!(job.status(), Paused | Standby) {
        return Err(QmpError::generic("Can't resume a job that was not paused"));
    }
    job.pause(false);
    Ok(())
}

/// A job for `query-jobs`.
fn described(job: &Job) -> Value {
    let (done, total) = job.bytes();
    let mut described = json!({
        "id": job.name(),
        "type": job.kind(),
        "status": job.status().name(),
        "current-progress": done,
        "total-progress": total,
    });
    if let Some(failure) = job.failure() {
        described["error"] = failure.facts().into();
    }
    described
}

/// A job for `query-block-jobs`.
fn described_as_block_job(job: &Job) -> Value {
    use blockhaul_jobs::Status::{Paused, Ready, Running, Standby};
    let status = job.status();
    let mut described = numbers(job);
    described.insert("io-status".into(), job.io_status().into());
    described.insert("auto-finalize".into(), (!job.settings().finalized_by_hand).into());
    described.insert("auto-dismiss".into(), (!job.settings().dismissed_by_hand).into());
    described.insert("busy".into(), (status == Running).into());
    described.insert("paused".into(), matches!(status, Paused | Standby).into());
    described.insert("ready".into(), matches!(status, Ready | Standby).into());
    described.insert("status".into(), status.name().into());
    if let Some(mirror) = job.mirror() {
        described.insert("actively-synced".into(), mirror.is_synced().into());
    }
    if let Some(failure) = job.failure() {
        described.insert("error".into(), failure.facts().into());
    }
    Value::Object(described)
}

/// What events and lists say about a job.
fn numbers(job: &Job) -> Map<String, Value> {
    let (done, total) = job.bytes();
    let mut numbers = Map::new();
    numbers.insert("device".into(), job.name().into());
    numbers.insert("type".into(), job.kind().into());
    numbers.insert("len".into(), total.into());
    numbers.insert("offset".into(), done.into());
    numbers.insert("speed".into(), job.speed().into());
    numbers
}

impl Node {
    /// The format that clients see in `image`.
    pub fn format(&self) -> &str {
        &self.driver
    }
}
