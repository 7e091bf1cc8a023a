//! Jobs that outlive a server: what is kept of them, and how they are resumed.
//!
//! A mirror is resumed as it was. The moment of a backup is lost with its server, which alone has the
//! old contents of what clients have overwritten: the job can go on at another moment only, with what
//! was not copied, and what clients have written since.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_catalog::DeviceSpec;
use blockhaul_control::{CopyMode, ErrorPolicy};
use blockhaul_snapshot::{OnFailure, PointOptions};
use blockhaul_transfer::{NamedOption, OptionValue, TransferErrorKind};
use serde_json::{Value, json};

use crate::bitmap_files::identity;
use crate::error::JobError;
use crate::export::OpenExport;
use crate::export_bitmaps::{DEFAULT_GRANULARITY, NewBitmap};
use crate::export_table::ExportTable;
use crate::job::Job;
use crate::job_config::{
    BackupConfig, BackupDisk, BackupSource, JobSettings, JobTarget, MirrorConfig,
};
use crate::job_files::JobRecord;
use crate::jobs::Jobs;
use crate::mirror::InitialCopy;
use crate::snapshot::{BitmapStep, DRAIN_LIMIT, JobMap, OpenSnapshot, SnapshotConfig};

impl Jobs {
    /// The record of each disk of a backup; none if jobs are not kept, or the source
    /// is no disk in use.
    pub(crate) async fn backup_records(
        &self,
        table: &Arc<ExportTable>,
        disks: &[BackupDisk],
        grouped: bool,
    ) -> Result<Vec<Option<Arc<JobRecord>>>, JobError> {
        let mut all = Vec::new();
        for item in disks {
            let record = match (&item.resumes, &item.source) {
                (Some(record), _) => Some(record.clone()),
                (None, BackupSource::Now(begin)) => {
                    let record = self.new_record(table, &item.export).await;
                    let record = record.inspect_err(|_| {
                        all.iter().flatten().for_each(|record: &Arc<JobRecord>| record.remove());
                    })?;
                    if let Some(record) = &record {
                        record.note(backup_facts(item, begin));
                    }
                    record
                }
                (None, BackupSource::Still(..)) => None,
            };
            all.push(record);
        }
        let group: Vec<_> = all.iter().flatten().map(|record| record.id()).collect();
        if grouped && group.len() > 1 {
            all.iter().flatten().for_each(|record| record.note(json!({ "group": group })));
        }
        Ok(all)
    }

    /// The record of a mirror; none if jobs are not kept.
    pub(crate) async fn mirror_record(
        &self,
        table: &Arc<ExportTable>,
        config: &MirrorConfig,
    ) -> Result<Option<Arc<JobRecord>>, JobError> {
        if let Some(record) = &config.resumes {
            return Ok(Some(record.clone()));
        }
        let record = self.new_record(table, &config.export).await?;
        if let Some(record) = &record {
            record.note(mirror_facts(config));
        }
        Ok(record)
    }

    async fn new_record(
        &self,
        table: &Arc<ExportTable>,
        export: &Arc<OpenExport>,
    ) -> Result<Option<Arc<JobRecord>>, JobError> {
        let Some(files) = table.config().job_files.clone() else { return Ok(None) };
        let Some(device) = export.device() else { return Ok(None) };
        let id = self.next();
        let export = export.clone();
        let begun =
            blockhaul_io::offload(move || files.begin(id, &export, device.facts().size)).await;
        begun.unwrap_or_else(|lost| Err(JobError::other(lost.to_string()))).map(Some)
    }

    /// Continues an interrupted job, and those of its group. `new_moment`: a backup may become the disk
    /// of now.
    ///
    /// # Errors
    /// If the job cannot be resumed. The job stays interrupted then.
    pub async fn resume(
        self: &Arc<Self>,
        table: &Arc<ExportTable>,
        id: u64,
        new_moment: bool,
    ) -> Result<Vec<Arc<Job>>, JobError> {
        let _turn = self.resuming.lock().await;
        let wrong = |why: &str| JobError::request(format!("job {id} cannot be resumed: {why}"));
        let job = self.find(id);
        let record = job.as_ref().and_then(|job| job.resumable());
        let Some(record) = record else { return Err(wrong("it is not interrupted")) };
        let group = self.group_of(record);
        for one in &group {
            if let Some(why) = one.unusable() {
                return Err(wrong(&format!("{why}; cancel it, and begin another one")));
            }
        }
        if !record.is_backup() {
            let config = resumed_mirror(table, record).await?;
            return Ok(vec![self.mirror(table, config).await?]);
        }
        if !new_moment {
            return Err(wrong(
                "its moment is lost, because the server that has ended had the old contents of what clients \
                 have overwritten: with --new-moment, what is missing and what has changed is copied, and \
                 the target becomes the disk of now",
            ));
        }
        let mut disks = Vec::new();
        for one in &group {
            disks.push(resumed_backup(table, one).await?);
        }
        self.backup(table, BackupConfig::new(disks)).await
    }

    /// The interrupted jobs of the group of this one.
    fn group_of(&self, record: &Arc<JobRecord>) -> Vec<Arc<JobRecord>> {
        let group = record.fact("group");
        let all = self.all();
        let resumable = all.iter().filter_map(|job| job.resumable());
        let of_group = resumable.filter(|one| {
            one.id() == record.id() || group.is_array() && one.fact("group") == group
        });
        of_group.cloned().collect()
    }

    /// Forgets an interrupted job. False: it is none.
    pub async fn forget(&self, table: &Arc<ExportTable>, id: u64) -> bool {
        let _turn = self.resuming.lock().await;
        let Some(job) = self.find(id) else { return false };
        let Some(record) = job.resumable().cloned() else { return false };
        let export = table.find(&record.export());
        let map = record.map();
        job.forget();
        let _ = blockhaul_io::offload(move || record.remove()).await;
        if let (Some(export), Some(map)) = (export, map) {
            table.forget_map(&export, &map).await;
        }
        log::info!("job {id}: cancelled");
        true
    }

    /// Begins the points in time of a backup, and makes its jobs outlive the server.
    pub(crate) async fn begin_snapshots(
        table: &Arc<ExportTable>,
        disks: &[BackupDisk],
        records: &[Option<Arc<JobRecord>>],
        bitmap_steps: &[BitmapStep],
    ) -> Result<Vec<OpenSnapshot>, JobError> {
        let tracked = |item: &BackupDisk, record: &Option<Arc<JobRecord>>| {
            let record = record.as_ref()?;
            let resumed = item.resumes.is_some().then(|| record.rest_bitmap_name());
            Some(JobMap { map: record.map()?, resumed })
        };
        let live: Vec<(&OpenExport, &SnapshotConfig, Option<JobMap>)> = disks
            .iter()
            .zip(records)
            .filter_map(|(item, record)| match &item.source {
                BackupSource::Now(begin) => Some((&*item.export, begin, tracked(item, record))),
                BackupSource::Still(..) => None,
            })
            .collect();
        let fresh: Vec<_> = disks
            .iter()
            .zip(records)
            .filter(|(item, _)| item.resumes.is_none())
            .filter_map(|(_, record)| record.clone())
            .collect();
        let begun = table.begin_snapshots(&live, bitmap_steps).await;
        let (failure, begun) = match begun {
            Err(failure) => (failure, Vec::new()),
            Ok(begun) => match commit_all(&fresh).await {
                Ok(()) => return Ok(begun),
                Err(failure) => (failure, begun),
            },
        };
        for ((export, _, tracked), one) in live.iter().zip(begun) {
            if let Some(JobMap { map, resumed: None }) = tracked {
                export.maps().retain(|other| !other.is_same(map));
            }
            if let Some(frozen) = &one.frozen {
                frozen.give_back();
            }
            table.end_snapshot(export, &one.snapshot).await;
        }
        let _ =
            blockhaul_io::offload(move || fresh.iter().for_each(|record| record.remove())).await;
        Err(failure)
    }
}

async fn commit_all(all: &[Arc<JobRecord>]) -> Result<(), JobError> {
    for record in all {
        record.persist().await?;
    }
    Ok(())
}

/// The facts that a job needs to be resumed, besides its disk.
fn common_facts(target: &JobTarget, options: &[NamedOption], settings: &JobSettings) -> Value {
    let target = match target.spec() {
        DeviceSpec::Command(words) => words.iter().map(|word| word.to_string_lossy()).collect(),
        spec => json!(spec.to_string()),
    };
    json!({
        "target": target,
        "options": options.iter().flat_map(option_words).collect::<Vec<_>>(),
        "name": settings.name,
        "finalized_by_hand": settings.finalized_by_hand,
        "dismissed_by_hand": settings.dismissed_by_hand,
        "on_source_error": settings.on_source_error.name(),
        "on_target_error": settings.on_target_error.name(),
        "speed": settings.speed,
        "compress": settings.compress,
    })
}

fn backup_facts(item: &BackupDisk, begin: &SnapshotConfig) -> Value {
    let mut facts = common_facts(&item.target, &item.options, &item.settings);
    let PointOptions { block, directory, max, guest_timeout, on_failure } = &begin.options;
    let clears = begin.bitmap.as_ref().filter(|_| begin.clears).or(begin.start.as_ref());
    facts["type"] = json!("backup");
    facts["selects"] = json!(item.selects);
    facts["bitmap"] = json!(clears);
    facts["seconds"] = json!(begin.within.as_secs());
    facts["snapshot"] = json!({
        "block": block,
        "directory": directory,
        "max": max,
        "guest_timeout": guest_timeout.as_nanos() as u64,
        "fails_writes": *on_failure == OnFailure::FailWrite,
    });
    facts
}

fn mirror_facts(config: &MirrorConfig) -> Value {
    let mut facts = common_facts(&config.target, &config.options, &config.settings);
    facts["type"] = json!("mirror");
    facts["seconds"] = json!(config.within.as_secs());
    facts["copy_mode"] = json!(config.copy_mode.name());
    match &config.initial {
        InitialCopy::All => {}
        InitialCopy::Nothing => facts["follows_only"] = json!(true),
        InitialCopy::Dirty(name) => facts["bitmap"] = json!(name),
    }
    facts
}

impl JobSettings {
    /// The settings of a job of an earlier server.
    pub fn from_record(record: &JobRecord) -> JobSettings {
        let policy = |name| ErrorPolicy::parse(&record.text(name)).unwrap_or_default();
        JobSettings {
            name: Some(record.text("name")).filter(|name| !name.is_empty()),
            finalized_by_hand: record.is("finalized_by_hand"),
            dismissed_by_hand: record.is("dismissed_by_hand"),
            on_source_error: policy("on_source_error"),
            on_target_error: policy("on_target_error"),
            speed: record.number("speed").unwrap_or(0),
            compress: record.is("compress"),
        }
    }
}

/// The export that has the disk of a job.
fn export_of(table: &ExportTable, record: &JobRecord) -> Result<Arc<OpenExport>, JobError> {
    let name = record.export();
    table.find(&name).ok_or_else(|| {
        JobError::new(TransferErrorKind::Open, format!("there is no export {name:?}"))
    })
}

/// The target of a job: a disk of the monitor protocol that has it open, or its description.
fn target_of(table: &ExportTable, record: &JobRecord) -> Result<JobTarget, JobError> {
    let spec = match record.fact("target") {
        Value::Array(words) => {
            let words = words.iter().map(|word| word.as_str().unwrap_or_default());
            DeviceSpec::Command(words.map(OsString::from).collect())
        }
        target => DeviceSpec::parse(OsStr::new(target.as_str().unwrap_or_default()))?,
    };
    let device = identity(&spec.to_string());
    let is_it = |one: &Arc<OpenExport>| !one.served && identity(&one.storage()) == device;
    let node = table.exports().into_iter().find(is_it);
    let stack =
        node.as_ref().and_then(|node| node.stack.lock().expect("no panic under this lock").clone());
    Ok(match stack {
        Some(stack) => JobTarget::Open(spec, stack, node),
        None => JobTarget::Spec(spec),
    })
}

/// The options of copy. A target that has a part of the disk does not read as zeroes any more.
fn options_of(record: &JobRecord) -> Vec<NamedOption> {
    let words = record.fact("options");
    let mut options = Vec::new();
    for word in words.as_array().into_iter().flatten().filter_map(Value::as_str) {
        add_option(&mut options, word);
    }
    options.retain(|option| !record.has_target() || option.name != "destination-is-zero");
    options
}

/// An option as words: `--NAME`, or `--NAME=VALUE` for each value.
fn option_words(option: &NamedOption) -> Vec<String> {
    let name = &option.name;
    match &option.value {
        OptionValue::Switch(_) => vec![format!("--{name}")],
        OptionValue::Texts(texts) => {
            texts.iter().map(|text| format!("--{name}={}", text.display())).collect()
        }
    }
}

/// Adds the option, or one more value of it, that is in this [word](words_of).
fn add_option(options: &mut Vec<NamedOption>, word: &str) {
    let word = word.strip_prefix("--").unwrap_or(word);
    let Some((name, text)) = word.split_once('=') else {
        options.push(NamedOption::flag(word));
        return;
    };
    match options.last_mut() {
        Some(NamedOption { name: last, value: OptionValue::Texts(texts) }) if last == name => {
            texts.push(text.into());
        }
        _ => options.push(NamedOption::new(name, text)),
    }
}

fn within(record: &JobRecord) -> Duration {
    record.number("seconds").map_or(DRAIN_LIMIT, Duration::from_secs)
}

/// The bitmap that is handed over to a job, if it was to be: after a crash, or without --bitmaps, it is
/// made again from what is left, which is all that the target lacks.
async fn restore_bitmap(
    table: &ExportTable,
    export: &OpenExport,
    record: &JobRecord,
) -> Result<Option<String>, JobError> {
    let name = record.text("bitmap");
    if name.is_empty() {
        return Ok(None);
    }
    if export.bitmap(&name).is_ok() {
        return Ok(Some(name));
    }
    let Some(map) = record.map() else { return Ok(None) };
    if export.forget_inconsistent(&name) {
        log::info!(export = export.name; "bitmap {name:?} is made again from job {}", record.id());
    }
    let bitmap = NewBitmap { name: &name, granularity: DEFAULT_GRANULARITY, kept: true };
    table.add_bitmap(export, bitmap, within(record)).await?;
    let added = export.bitmap(&name)?;
    // What was written before it was added.
    map.ranges().iter().for_each(|&(at, len)| added.set(at, len));
    Ok(Some(name))
}

async fn resumed_backup(
    table: &Arc<ExportTable>,
    record: &Arc<JobRecord>,
) -> Result<BackupDisk, JobError> {
    let export = export_of(table, record)?;
    let snapshot = record.fact("snapshot");
    let number = |name: &str| snapshot[name].as_u64();
    let standard = PointOptions::default();
    let options = PointOptions {
        block: number("block").unwrap_or(standard.block),
        directory: snapshot["directory"].as_str().map(PathBuf::from),
        max: number("max").unwrap_or(standard.max),
        guest_timeout: number("guest_timeout").map_or(standard.guest_timeout, Duration::from_nanos),
        on_failure: if snapshot["fails_writes"] == true {
            OnFailure::FailWrite
        } else {
            OnFailure::BreakSnapshot
        },
    };
    let bitmap = restore_bitmap(table, &export, record).await?;
    let is_part = record.has_target() || record.fact("selects").is_string();
    let begin =
        SnapshotConfig { options, bitmap, within: within(record), ..SnapshotConfig::default() };
    Ok(BackupDisk {
        options: options_of(record),
        selects: is_part.then(|| record.rest_bitmap_name()),
        settings: JobSettings::from_record(record),
        resumes: Some(record.clone()),
        ..BackupDisk::new(export, target_of(table, record)?, begin)
    })
}

async fn resumed_mirror(
    table: &Arc<ExportTable>,
    record: &Arc<JobRecord>,
) -> Result<MirrorConfig, JobError> {
    let export = export_of(table, record)?;
    let initial = match restore_bitmap(table, &export, record).await? {
        Some(name) => InitialCopy::Dirty(name),
        None if record.is("follows_only") => InitialCopy::Nothing,
        None => InitialCopy::All,
    };
    Ok(MirrorConfig {
        target: target_of(table, record)?,
        options: options_of(record),
        within: within(record),
        initial,
        copy_mode: CopyMode::parse(&record.text("copy_mode")).unwrap_or_default(),
        settings: JobSettings::from_record(record),
        resumes: Some(record.clone()),
        export,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_kept_as_words() {
        let layers = ["readonly", "rate?rate=1M"].map(OsString::from);
        let options = [
            NamedOption::new("rate", "08:00-18:00=5M,*=0"),
            NamedOption::from_texts("target-layer", &layers),
            NamedOption::flag("verify"),
        ];
        let words: Vec<_> = options.iter().flat_map(option_words).collect();
        assert_eq!(words[3..], ["--verify"]);
        let mut read = Vec::new();
        words.iter().for_each(|word| add_option(&mut read, word));
        assert_eq!(read, options);
    }
}
