//! What a copy would read and write. Both sides are opened for reading, and nothing is changed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, Error, ExtentReader, Kind, ZERO};
use blockhaul_catalog::{DeviceSpec, Intent, Layer, Stack, TargetMaking, rounded_size};
use blockhaul_engine::{CopyError, EngineOptions};
use blockhaul_io::Pool;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::context::{CopyContext, SourceDevice, is_absent, of_journal};
use crate::description::{file_of, is_image, is_nbd};
use crate::error::{Result, TransferError, TransferStep};
use crate::error_map::only_failed;
use crate::printable::one_line;
use crate::setup::CopySetup;

/// The work of a copy, as far as it is known before; nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyPlan {
    /// The source, without secrets.
    pub source: String,
    /// Bytes of the source; `None` for standard input.
    pub source_size: Option<u64>,
    /// Bytes that are selected; `None` if that is unknown.
    pub selected: Option<u64>,
    /// Bytes of data in the selection, which are read and written; `None` if the source does not tell.
    pub data: Option<u64>,
    /// The source is read a second time, or to its end, before its changes are known.
    pub reads_all: bool,
    /// The target, without secrets.
    pub target: String,
    /// What happens to the target.
    pub target_change: TargetChange,
    /// The journal, and whether it records a copy that goes on.
    pub journal: Option<(PathBuf, bool)>,
    /// Bytes that the journal records as copied; 0 if that is unknown.
    pub recorded: u64,
    /// The manifest that is written.
    pub manifest: Option<PathBuf>,
    /// Both sides are read again and compared.
    pub verifies: bool,
    /// The map of errors that is written, and whether only what an earlier copy has put there is read again.
    pub error_map: Option<(PathBuf, bool)>,
}

/// What happens to the target of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetChange {
    /// It does not exist, and is made.
    Created,
    /// It is overwritten; this many bytes of its contents are lost.
    Overwritten(u64),
    /// It is a file that is overwritten and gets another size.
    Resized {
        /// Bytes of its contents, which are lost.
        lost: u64,
        /// Bytes of the file after the copy.
        size: u64,
    },
    /// It is an image with a disk of `lost` bytes, which a new image with a disk of `size` bytes replaces, without its
    /// snapshots, bitmaps and backing file.
    Replaced {
        /// Bytes of the disk in the image.
        lost: u64,
        /// Bytes of the new disk.
        size: u64,
    },
    /// What is not copied stays, in a target of this many bytes.
    Kept(u64),
    /// It is standard output.
    Stream,
    /// It can only be opened for writing, which is not tried.
    Unknown,
}

impl TargetChange {
    fn name(self) -> &'static str {
        match self {
            TargetChange::Created => "created",
            TargetChange::Overwritten(_) | TargetChange::Resized { .. } => "overwritten",
            TargetChange::Replaced { .. } => "replaced",
            TargetChange::Kept(_) => "kept",
            TargetChange::Stream => "stream",
            TargetChange::Unknown => "unknown",
        }
    }

    fn size(self) -> Option<u64> {
        match self {
            TargetChange::Overwritten(size)
            | TargetChange::Kept(size)
            | TargetChange::Resized { lost: size, .. }
            | TargetChange::Replaced { lost: size, .. } => Some(size),
            _ => None,
        }
    }

    /// Bytes of the target after the copy, if that is known and another size than before.
    fn new_size(self) -> Option<u64> {
        match self {
            TargetChange::Resized { size, .. } | TargetChange::Replaced { size, .. } => Some(size),
            _ => None,
        }
    }
}

impl CopySetup {
    /// Finds out what the copy would do. Opens both sides for reading only, and writes no file. Runs on a worker.
    ///
    /// # Errors
    /// If the copy would be refused: a side cannot be opened, or both do not fit. Whether the target can be written
    /// is known of files, block devices and exports, and not tried otherwise.
    pub async fn plan(self) -> Result<CopyPlan> {
        let (mut context, source) = self.into_planning();
        let plan = context.plan(source).await;
        context.close().await;
        plan
    }
}

impl CopyContext {
    async fn plan(&mut self, source: SourceDevice) -> Result<CopyPlan> {
        let [source_name, target] =
            [&self.source, &self.target].map(|side| crate::without_secrets(&side.to_string()));
        let mut plan = CopyPlan {
            source: source_name,
            source_size: None,
            selected: None,
            data: None,
            reads_all: self.manifest.is_some() || self.selection.reads_all(),
            target,
            target_change: TargetChange::Stream,
            journal: self.journal.as_ref().map(|own| (own.path.clone(), own.goes_on())),
            recorded: 0,
            manifest: self.manifest.as_ref().map(|manifest| manifest.path().clone()),
            verifies: self.verifies,
            error_map: self
                .error_map
                .as_ref()
                .map(|map| (map.path().to_path_buf(), map.is_tried())),
        };
        if let Some(manifest) = &self.manifest {
            manifest.check()?;
        }
        self.check_error_map()?;
        self.check_own_files()?;
        if self.source == DeviceSpec::Pipe {
            plan.target_change = self.target_change(None, &mut plan.recorded).await?;
            return Ok(plan);
        }
        let source = self.open_source(source, Intent::READ).await?;
        self.check_source(&source.device().facts())?;
        let size = source.device().facts().size;
        plan.source_size = Some(size);
        if let Some(map) = &self.error_map {
            map.fit(size)?;
        }
        if self.target != DeviceSpec::Pipe {
            self.check_target_file(&source)?;
            plan.target_change = self.target_change(Some(&source), &mut plan.recorded).await?;
        }
        let failed = |error: Error| {
            TransferError::engine(TransferStep::Selection, CopyError::at_source(error))
        };
        if self.selection.reads_all() {
            return Ok(plan);
        }
        if let Some(map) = self.error_map.as_ref().filter(|map| map.is_tried()) {
            plan.selected = Some(map.totals().1);
            return Ok(plan);
        }
        let ranges = self.selected(&source, size).await?;
        plan.selected = Some(ranges.iter().map(|range| range.1).sum());
        plan.data = data_bytes(&source, &ranges).await.map_err(failed)?;
        Ok(plan)
    }

    /// The ranges of the source that are selected.
    async fn selected(&self, source: &Stack, size: u64) -> Result<Vec<(u64, u64)>> {
        if let Some(bitmap) = &self.engine.bitmap {
            let progress = self.control.progress();
            let found = blockhaul_engine::bitmap_ranges(source, bitmap, &self.engine, progress);
            let found = found.await;
            return found.map_err(|error| TransferError::engine(TransferStep::Selection, error));
        }
        Ok(self.engine.ranges.as_ref().map_or_else(|| vec![(0, size)], |ranges| ranges.to_vec()))
    }

    /// What happens to a target that a new one replaces.
    async fn replaced_target(&self) -> TargetChange {
        match self.registry.open(&self.target, Vec::new(), Intent::READ).await {
            Ok(target) => TargetChange::Overwritten(target.device().facts().size),
            Err(error) if error.kind() == Kind::NotFound => TargetChange::Created,
            // Who may write may be refused to read.
            Err(_) => self.unreadable_target(),
        }
    }

    /// The change of a target that cannot be read: a file is of another format, and goes.
    fn unreadable_target(&self) -> TargetChange {
        match file_of(&self.target).and_then(|file| file.metadata().ok()) {
            Some(known) if known.is_file() => TargetChange::Overwritten(known.len()),
            _ => TargetChange::Unknown,
        }
    }

    /// Checks a target that the copy makes, without making it.
    async fn check_made_target(
        &mut self,
        source: Option<&Stack>,
        layers: Vec<Arc<dyn Layer>>,
    ) -> Result<u64> {
        let from = source.map(|source| source.device().facts());
        let intent = match &from {
            Some(from) if !self.target_is_kept() => Intent::target(from.size),
            _ => Intent::TARGET,
        };
        let opened = self.registry.open_target(&self.target, layers, intent).await;
        let (target, _) = opened.map_err(|error| self.target_error(&error))?;
        self.keep_open(&target);
        let to = target.device().facts();
        if let Some(from) = from {
            self.check_apart(&from.files, &to.files)?;
            self.check_replaced(&to)?;
            self.check_size(&from, &to)?;
        }
        Ok(to.size)
    }

    /// What happens to the target, which is opened for reading if it exists.
    async fn target_change(
        &mut self,
        source: Option<&Stack>,
        recorded: &mut u64,
    ) -> Result<TargetChange> {
        let file = file_of(&self.target);
        if let Some(file) = file.as_ref().filter(|file| is_absent(file)) {
            return match folder_error(file) {
                None => Ok(TargetChange::Created),
                Some(errno) => {
                    let error = Error::system("cannot create it", errno.into());
                    Err(self.target_error(&error.with_remedy(remedy(errno))))
                }
            };
        }
        if let Some(file) = &file {
            self.check_file(file).await?;
        }
        let layers = std::mem::take(&mut self.target_layers);
        if matches!(self.target, DeviceSpec::Command(_)) {
            // What the command would do is unknown.
            return Ok(TargetChange::Unknown);
        }
        let making = self.registry.target_making(&self.target);
        if making == TargetMaking::NewVersion {
            let is_kept = self.target_is_kept() || source.is_none();
            let size = self.check_made_target(source, layers).await?;
            return Ok(if is_kept { TargetChange::Kept(size) } else { TargetChange::Created });
        }
        if making == TargetMaking::Always {
            self.check_made_target(source, layers).await?;
            return Ok(self.replaced_target().await);
        }
        let opened = self.registry.open(&self.target, layers.clone(), Intent::READ).await;
        let target = match opened {
            Ok(target) => target,
            Err(error) if making == TargetMaking::IfAbsent && error.kind() == Kind::NotFound => {
                self.check_made_target(source, layers).await?;
                return Ok(TargetChange::Created);
            }
            // A target that can only be written.
            Err(error)
                if making == TargetMaking::Never
                    && matches!(error.kind(), Kind::Usage | Kind::Unsupported) =>
            {
                return Ok(self.unreadable_target());
            }
            Err(error) => return Err(self.target_error(&error)),
        };
        self.keep_open(&target);
        let to = target.device().facts();
        if to.temporary && to.size == 0 {
            // It takes the size of the source.
            return Ok(TargetChange::Unknown);
        }
        if is_nbd(&self.target) {
            self.check_writable(&to)?;
        }
        // A file becomes as long as the source.
        let is_file = file.is_some_and(|file| file.is_file());
        let has_own_size = !is_file && !is_image(&self.target);
        let mut lost = to.size;
        if let Some(source) = source {
            self.check_resumption(source, &target, recorded).await?;
            let from = source.device().facts();
            self.check_apart(&from.files, &to.files)?;
            if self.target_is_kept() || to.grows_from.is_none() && has_own_size {
                self.check_size(&from, &to)?;
            }
            if is_image(&self.target) && !self.target_is_kept() {
                return Ok(TargetChange::Replaced { lost, size: from.size });
            }
            if has_own_size {
                lost = lost.min(from.size);
            } else if !self.target_is_kept() && from.size != to.size {
                return Ok(TargetChange::Resized { lost, size: from.size });
            }
        }
        let is_kept = self.target_is_kept();
        Ok(if is_kept { TargetChange::Kept(to.size) } else { TargetChange::Overwritten(lost) })
    }

    /// Refuses the journal of another copy, as the copy would.
    async fn check_resumption(
        &self,
        source: &Stack,
        target: &Stack,
        recorded: &mut u64,
    ) -> Result<()> {
        let from = source.device().facts();
        // A target that gets the size of the source is another one before.
        let is_known = target.device().facts().size == from.size || self.target_is_kept();
        if !self.goes_on() || !is_known || self.selection.reads_all() {
            return Ok(());
        }
        let journal = self.journal_options(&from, None);
        let options = EngineOptions { journal, ..self.engine.clone() };
        let pool = Pool::new(options.memory());
        let checked = blockhaul_engine::check_resumption(source, target, &options, &pool).await;
        *recorded = checked.map_err(of_journal)?;
        Ok(())
    }

    /// Refuses a journal, a manifest or a map of errors that cannot be created.
    fn check_own_files(&self) -> Result<()> {
        if let Some(journal) = &self.journal
            && let Some(errno) = folder_error(&journal.path)
        {
            let text = format!("cannot create the journal {}", journal.path.display());
            return Err(of_journal(Error::system(text, errno.into()).with_remedy(remedy(errno))));
        }
        if let Some(manifest) = &self.manifest
            && let Some(errno) = folder_error(manifest.path())
        {
            return Err(manifest.failed(errno.into()));
        }
        match &self.error_map {
            Some(map) => {
                folder_error(map.path()).map_or(Ok(()), |errno| Err(map.unwritable(&errno.into())))
            }
            None => Ok(()),
        }
    }

    /// Opens the file or block device of the target for writing, and closes it: refuses one that the copy could not
    /// open, or that is in use. Nothing is written; programs that watch the file, such as udev, may notice that it was closed.
    async fn check_file(&self, file: &Path) -> Result<()> {
        let is_inside = is_image(&self.target);
        let spec = if is_inside { DeviceSpec::Path(file.into()) } else { self.target.clone() };
        let opened = self.registry.open(&spec, Vec::new(), Intent::TARGET).await;
        let opened = opened.map_err(|error| {
            let is_refused = matches!(error.kind(), Kind::Refused | Kind::ReadOnly);
            let remedy = "choose another place, or change the permissions";
            self.target_error(&if is_refused { error.with_remedy(remedy) } else { error })
        })?;
        // Fails only when the program ends.
        let _ = blockhaul_io::offload(move || drop(opened)).await;
        Ok(())
    }
}

/// Why a file that is absent cannot be created; `None`: it can.
fn folder_error(file: &Path) -> Option<Errno> {
    if !is_absent(file) {
        return None;
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    accessat(CWD, folder, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).err()
}

fn remedy(errno: Errno) -> &'static str {
    match errno {
        Errno::NOENT | Errno::NOTDIR => "create its directory first",
        _ => "choose another place, or change the permissions",
    }
}

/// Bytes of data in these ranges of a device; `None`: it does not report where its data is.
///
/// # Errors
/// If the extents cannot be read.
pub async fn data_bytes(source: &Stack, ranges: &[(u64, u64)]) -> Result<Option<u64>, Error> {
    let device = source.device();
    let Some(base) = device.facts().context(BASE_ALLOCATION) else { return Ok(None) };
    let mut data = 0;
    for &(at, len) in ranges {
        let mut extents = ExtentReader::new(Arc::clone(device), base, (at, at.saturating_add(len)));
        while let Some(part) = extents.next().await? {
            part.for_each_run(|_, len, states| {
                if states.first().is_none_or(|state| state & ZERO == 0) {
                    data += len;
                }
                Ok::<(), Error>(())
            })?;
        }
    }
    Ok(Some(data))
}

impl CopyPlan {
    /// Lines for users, each after `prefix`.
    pub fn text(&self, prefix: &str) -> String {
        let shown = |bytes: u64| format!("{bytes} bytes ({})", rounded_size(bytes));
        let source = &self.source;
        let read = match (self.selected, self.data) {
            (Some(selected), Some(data)) if data < selected => format!(
                "would read {} of data from {source}; {} more are zeroes",
                shown(data),
                shown(selected - data)
            ),
            (Some(selected), _) => format!("would read {} from {source}", shown(selected)),
            (None, _) => match self.source_size {
                Some(size) => {
                    format!("would read {} from {source}, and write what has changed", shown(size))
                }
                None => "would read standard input to its end".to_string(),
            },
        };
        let target = match self.target_change {
            TargetChange::Created => "would create".to_string(),
            TargetChange::Overwritten(lost) | TargetChange::Resized { lost, .. } => {
                format!("would overwrite {} in", shown(lost))
            }
            TargetChange::Replaced { lost, .. } => {
                format!("would replace the image (a disk of {}) in", shown(lost))
            }
            TargetChange::Kept(size) => format!("would change parts of the {} in", shown(size)),
            TargetChange::Stream | TargetChange::Unknown => "would write to".to_string(),
        };
        let size = self.target_change.new_size();
        let size =
            size.map_or_else(String::new, |size| format!(", which then has {}", shown(size)));
        let mut lines = vec![read, format!("{target} {}{size}", self.target)];
        if let Some((journal, goes_on)) = &self.journal {
            let what = if *goes_on { "would go on by" } else { "would write" };
            let recorded = match self.recorded {
                0 => String::new(),
                recorded => format!(", by which {} are copied already", shown(recorded)),
            };
            lines.push(format!("{what} the journal {}{recorded}", journal.display()));
        }
        if let Some(manifest) = &self.manifest {
            lines.push(format!("would write the manifest {}", manifest.display()));
        }
        if self.verifies {
            lines.push("would read both sides again and compare them".to_string());
        }
        match &self.error_map {
            Some((map, true)) => lines.push(only_failed(map)),
            Some((map, false)) => {
                lines.push(format!("would write the error map {}", map.display()))
            }
            None => {}
        }
        lines.iter().map(|line| one_line(&format!("{prefix}{line}")) + "\n").collect()
    }

    /// The plan for programs.
    pub fn json(&self) -> Value {
        json!({
            "dry_run": true,
            "source": self.source, "source_size": self.source_size, "selected": self.selected,
            "data": self.data, "reads_all": self.reads_all, "target": self.target,
            "target_change": self.target_change.name(), "target_size": self.target_change.size(),
            "target_new_size": self.target_change.new_size(),
            "journal": self.journal.as_ref().map(|(path, _)| path.display().to_string()),
            "recorded": self.recorded,
            "resumes": self.journal.as_ref().is_some_and(|(_, goes_on)| *goes_on),
            "manifest": self.manifest.as_ref().map(|path| path.display().to_string()),
            "verifies": self.verifies,
            "error_map": self.error_map.as_ref().map(|(path, _)| path.display().to_string()),
        })
    }
}

/// The plan of a copy with its name; a copy that is the only one has none.
pub type NamedPlan = (Option<String>, CopyPlan);

/// What copies would do, for users.
pub fn plans_text(plans: &[NamedPlan]) -> String {
    let prefix = |name: &Option<String>| {
        name.as_ref().map_or_else(String::new, |name| format!("disk {name}: "))
    };
    let lines = plans.iter().map(|(name, plan)| plan.text(&prefix(name)));
    lines.collect::<String>() + "nothing was changed\n"
}

/// What copies would do, for programs: the plan of the only copy, or `disks`.
pub fn plans_json(plans: &[NamedPlan]) -> Value {
    if let [(None, plan)] = plans {
        return plan.json();
    }
    let named = plans.iter().map(|(name, plan)| {
        let mut plan = plan.json();
        plan["name"] = name.as_deref().into();
        plan
    });
    json!({ "dry_run": true, "disks": named.collect::<Vec<_>>() })
}
