//! `qemu-img map`.

use std::fmt::Write as _;
use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, ContextSet, Device, Error, ExtentReader, HOLE, Kind, LeaseAccess, ZERO,
};
use blockhaul_catalog::{DeviceSpec, Intent, NamePolicy, OpenContext, Registry, Stack};
use blockhaul_command_lines::qemu_image::{ImageLocation, QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::describe::ChainLink;
use blockhaul_formats::qcow2::places::{ZeroPlaces, chain_places};
use blockhaul_formats::{HELD, held};
use blockhaul_transfer::one_line;

use crate::error::{QemuImgStatus, Result, failure};
use crate::image::{not_opened, size};
use crate::probe::format_of_device;
use crate::tool::QemuImg;

/// The context with the depth of ranges in a chain of images.
const DEPTH: &str = "qemu:allocation-depth";

/// A run of the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MapRun {
    at: u64,
    len: u64,
    depth: usize,
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    offset: Option<u64>,
}

/// Appends a run, joined to the last one if it continues that.
fn add(all: &mut Vec<MapRun>, run: MapRun) {
    match all.last_mut() {
        Some(last) if last.takes(&run) => last.len += run.len,
        _ => all.push(run),
    }
}

impl MapRun {
    /// Data of a raw disk.
    fn raw(at: u64, len: u64) -> MapRun {
        MapRun {
            at,
            len,
            depth: 0,
            present: true,
            zero: false,
            data: true,
            compressed: false,
            offset: Some(at),
        }
    }

    /// Whether `next` continues it.
    fn takes(&self, next: &MapRun) -> bool {
        let offset = self.offset.map(|offset| offset.saturating_add(self.len));
        let state = |run: &MapRun| (run.depth, run.present, run.zero, run.data, run.compressed);
        state(self) == state(next) && offset == next.offset
    }
}

/// The images of a chain: their names, the top first.
struct ImageChain {
    names: Vec<String>,
    /// The sizes of their disks in bytes.
    sizes: Vec<u64>,
    /// Whether the last one is a raw disk, which has everything.
    ends_raw: bool,
    is_qcow2: bool,
}

impl ImageChain {
    /// A raw disk alone.
    fn raw(name: String) -> ImageChain {
        ImageChain { names: vec![name], sizes: Vec::new(), ends_raw: true, is_qcow2: false }
    }

    /// Reads the images of a qcow2 image, and where each has its data. `shown`: the name of the first one, if
    /// it is not its path.
    async fn read(
        registry: &Registry,
        image: &QemuImage,
        shown: Option<String>,
    ) -> Result<(ImageChain, Vec<Option<ZeroPlaces>>), Error> {
        let context = OpenContext::new(registry).with_names(NamePolicy::Allow);
        let (links, places): (Vec<ChainLink>, Vec<_>) =
            chain_places(&context, &image.holder()).await?.into_iter().unzip();
        let ends_raw = links.last().is_some_and(|link| link.image.is_none());
        let name = |name: &str| name.trim_start_matches("./").to_string();
        let mut names: Vec<String> = links.iter().map(|link| name(&link.name)).collect();
        if let (Some(first), Some(shown)) = (names.first_mut(), shown) {
            *first = shown;
        }
        let size = |link: &ChainLink| link.image.as_ref().map_or(link.len, |one| one.size);
        let sizes = links.iter().map(size).collect();
        Ok((ImageChain { names, sizes, ends_raw, is_qcow2: true }, places))
    }

    /// Where the search for a range that no image has ends: before an image that is too short. The
    /// depth there, and the length of what ends there.
    fn end_of_search(&self, at: u64, len: u64) -> (usize, u64) {
        let lowest = self.names.len().saturating_sub(1);
        let reached = self.sizes.iter().skip(1).take_while(|size| at < **size);
        let depth = reached.clone().count().min(lowest);
        let left = reached.map(|size| size - at).min().unwrap_or(len);
        (depth, len.min(left))
    }
}

/// The part of a disk that is mapped.
struct MapRequest {
    image: QemuImage,
    /// None: the first bytes of the export tell it.
    format: Option<QemuFormat>,
    /// The metadata context of the server that takes the place of that of holes and zeroes.
    context: Option<String>,
    /// An export is opened once: its server may have room for one client, and end with it.
    is_export: bool,
    /// The first byte, and the maximum number of bytes.
    start: u64,
    most: u64,
    /// Whether the places of data are shown that is in no range of a file.
    with_places: bool,
}

impl QemuImg {
    /// Runs `map`.
    pub(crate) fn map(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(1)?;
        let is_json = line.is_json()?;
        let request = self.map_request(line, is_json)?;
        let image = request.image.clone();
        let contexts: Vec<String> = request.context.iter().cloned().collect();
        let (result, open) = self.on_worker_asking(&contexts, move |registry| async move {
            let mut open = Vec::new();
            (request.read(registry, &mut open).await, open)
        })?;
        // Not on a worker: this waits for servers to end.
        drop(open);
        let (runs, chain) = result.map_err(|error| not_opened(&image, &error))?;
        let text = if is_json { json(&runs) } else { human(&runs, &chain)? };
        self.print(&text)
    }

    fn map_request(&self, line: &QemuImgCommand, is_json: bool) -> Result<MapRequest> {
        let start = line.value("start-offset").map(size).transpose()?.unwrap_or(0);
        let most = line.value("max-length").map(size).transpose()?.unwrap_or(u64::MAX);
        let mut image = line.image(0, "format")?;
        let context = image.context.take();
        let format = match image.unknown_export() {
            Some(_) if context.is_none() => None,
            _ => Some(self.image_format(&image)?),
        };
        match format {
            Some(QemuFormat::Qcow2) if context.is_some() => {
                return Err(failure("map: x-dirty-bitmap is supported for raw disks only"));
            }
            None | Some(QemuFormat::Raw | QemuFormat::Qcow2) => {}
            Some(other) => return Err(failure(no_map(other))),
        }
        let is_export = image.path().is_none();
        let with_places = is_json || is_export;
        Ok(MapRequest { image, format, context, is_export, start, most, with_places })
    }
}

fn no_map(format: QemuFormat) -> String {
    format!("map: format {} is not supported", format.name())
}

impl MapRequest {
    /// Reads the map. Devices that stay open are added to `open`.
    async fn read(
        mut self,
        mut registry: Registry,
        open: &mut Vec<Stack>,
    ) -> Result<(Vec<MapRun>, ImageChain), Error> {
        let shown = self.image.path().map(|path| path.display().to_string());
        let shown = shown.unwrap_or_else(|| self.image.shown.clone());
        let format = self.open_export(&mut registry, open).await?;
        let (chain, places) = match format {
            QemuFormat::Qcow2 => {
                let shown = self.is_export.then_some(shown);
                ImageChain::read(&registry, &self.image, shown).await?
            }
            QemuFormat::Raw => (ImageChain::raw(shown), Vec::new()),
            other => return Err(Error::new(Kind::Unsupported, no_map(other))),
        };
        let disk = DeviceSpec::parse(self.image.disk(format, &[]).as_ref())?;
        let stack = registry.open(&disk, Vec::new(), Intent::READ).await?;
        let device = stack.device().clone();
        open.push(stack);
        let size = device.facts().size;
        let range = (self.start, self.end(size));
        if let Some(name) = &self.context {
            return Ok((flagged(&device, name, range).await?, chain));
        }
        let mut runs = runs(&device, &chain, range).await?;
        if format == QemuFormat::Raw {
            self.fill_sector(&mut runs, size);
        }
        if self.with_places {
            runs = with_places(runs, &places, self.is_export).await?;
        }
        Ok((runs, chain))
    }

    /// The end of the part of a disk of `size` bytes.
    fn end(&self, size: u64) -> u64 {
        self.start.saturating_add(self.most).min(size)
    }

    /// Opens the device of an export, which is found in `registry` then, and returns the format of the image.
    async fn open_export(
        &mut self,
        registry: &mut Registry,
        open: &mut Vec<Stack>,
    ) -> Result<QemuFormat, Error> {
        if !self.is_export {
            return Ok(self.format.unwrap_or(QemuFormat::Raw));
        }
        let holder = DeviceSpec::parse(self.image.holder().as_ref())?;
        let stack = registry.open(&holder, Vec::new(), Intent::READ).await?;
        let device = stack.device().clone();
        open.push(stack);
        let format = match self.format {
            Some(format) => format,
            None => format_of_device(&device).await?,
        };
        registry.backends.push(held(device.into()));
        self.image.place = ImageLocation::Uri(format!("{HELD}:"));
        Ok(format)
    }

    /// Shows a raw disk to the end of its last sector, as QEMU does, which counts in sectors.
    fn fill_sector(&self, runs: &mut Vec<MapRun>, size: u64) {
        let end = self.end(size.checked_next_multiple_of(512).unwrap_or(size));
        if size >= end || self.start > size {
            return;
        }
        // Direct I/O transfers the end of the file as a whole.
        match runs.last_mut().filter(|_| self.image.direct) {
            Some(last) => last.len += end - size,
            None => add(runs, MapRun { data: false, zero: true, ..MapRun::raw(size, end - size) }),
        }
    }
}

/// The runs of a metadata context, taken for one of holes and zeroes as in QEMU: what a bitmap marks
/// is shown as absent.
async fn flagged(
    device: &Arc<dyn Device>,
    name: &str,
    range: (u64, u64),
) -> Result<Vec<MapRun>, Error> {
    let none = || Error::new(Kind::Unsupported, format!("the server has no context {name:?}"));
    let contexts = device.facts().context(name).ok_or_else(none)?;
    // In these two flags: none, this image, and any one below it.
    let most = if name == DEPTH { 2 } else { u64::MAX };
    let mut all = Vec::new();
    let mut extents = ExtentReader::new(device.clone(), contexts, range);
    while let Some(part) = extents.next().await? {
        part.for_each_run(|at, len, states| {
            let state = states.first().map_or(0, |state| *state.min(&most));
            let present = state & HOLE == 0;
            let run = MapRun::raw(at, len);
            let offset = run.offset.filter(|_| present);
            add(
                &mut all,
                MapRun { present, data: present, zero: state & ZERO != 0, offset, ..run },
            );
            Ok::<(), Error>(())
        })?;
    }
    Ok(all)
}

async fn runs(
    device: &Arc<dyn Device>,
    chain: &ImageChain,
    range: (u64, u64),
) -> Result<Vec<MapRun>, Error> {
    let facts = device.facts();
    let first = facts.context(BASE_ALLOCATION).unwrap_or_else(ContextSet::first);
    let depth = facts.context(DEPTH).filter(|_| chain.is_qcow2);
    let contexts = depth.iter().flat_map(|one| one.iter()).fold(first, ContextSet::with);
    // Lists are in the order of their numbers.
    let base_first = contexts.iter().next() == first.iter().next();
    let mut all: Vec<MapRun> = Vec::new();
    let mut extents = ExtentReader::new(device.clone(), contexts, range);
    while let Some(part) = extents.next().await? {
        part.for_each_run(|mut at, len, states| {
            let (base, level) = match states {
                [base] => (*base, 1),
                [base, level, ..] if base_first => (*base, *level),
                [level, base, ..] => (*base, *level),
                [] => (0, 1),
            };
            let mut left = len;
            while left > 0 {
                let run = one(device, chain, (at, left), (base, level));
                at += run.len;
                left -= run.len;
                add(&mut all, run);
            }
            Ok::<(), Error>(())
        })?;
    }
    Ok(all)
}

/// The runs, with the places of those that read as zeroes and have space nevertheless, and of data in
/// an export, which no device knows as a range of a file.
async fn with_places(
    runs: Vec<MapRun>,
    places: &[Option<ZeroPlaces>],
    is_export: bool,
) -> Result<Vec<MapRun>, Error> {
    let mut all: Vec<MapRun> = Vec::new();
    for run in runs {
        let places = places.get(run.depth).and_then(Option::as_ref);
        let is_zero = run.present && run.zero;
        let is_unknown = is_zero || is_export && run.depth == 0 && run.compressed;
        let Some(places) = places.filter(|_| is_unknown && run.offset.is_none()) else {
            all.push(run);
            continue;
        };
        let mut left = run;
        while left.len > 0 {
            let (len, offset) = places.host(left.at, left.len).await?;
            all.push(MapRun {
                len,
                offset,
                compressed: left.compressed && offset.is_none(),
                ..left
            });
            left.at += len;
            left.len -= len;
        }
    }
    Ok(all)
}

/// The first run of a range in one state.
fn one(
    device: &Arc<dyn Device>,
    chain: &ImageChain,
    (at, len): (u64, u64),
    state: (u64, u64),
) -> MapRun {
    let (base, level) = state;
    let lowest = chain.names.len().saturating_sub(1);
    let (depth, len) = match usize::try_from(level) {
        Ok(level @ 1..) => ((level - 1).min(lowest), len),
        _ => chain.end_of_search(at, len),
    };
    let is_raw = chain.ends_raw && depth == lowest;
    let mut run = MapRun {
        at,
        len,
        depth,
        present: level > 0 || is_raw,
        zero: base & ZERO != 0,
        data: base & HOLE == 0,
        compressed: false,
        offset: None,
    };
    if is_raw {
        run.offset = Some(at);
        return run;
    }
    run.data = !run.zero;
    if run.data {
        match device.file_at(at, len, LeaseAccess::Read) {
            Some(file) => {
                run.len = file.len.min(len).max(1);
                run.offset = Some(file.at);
            }
            None => run.compressed = true,
        }
    }
    run
}

fn json(runs: &[MapRun]) -> String {
    let mut text = "[".to_string();
    for (index, run) in runs.iter().enumerate() {
        let MapRun { at, len, depth, present, zero, data, compressed, offset } = run;
        let separator = if index > 0 { ",\n" } else { "" };
        let offset = offset.map(|offset| format!(", \"offset\": {offset}")).unwrap_or_default();
        let _ = write!(
            text,
            "{separator}{{ \"start\": {at}, \"length\": {len}, \"depth\": {depth}, \"present\": {present}, \
             \"zero\": {zero}, \"data\": {data}, \"compressed\": {compressed}{offset}}}"
        );
    }
    text + "]\n"
}

fn human(runs: &[MapRun], chain: &ImageChain) -> Result<String> {
    let row = |one: &str, two: &str, three: &str, name: &str| {
        format!("{one:<16}{two:<16}{three:<16}{name}\n")
    };
    let number = |number: u64| if number == 0 { "0".to_string() } else { format!("{number:#x}") };
    let mut text = row("Offset", "Length", "Mapped to", "File");
    for run in runs.iter().filter(|run| run.data && !run.zero) {
        let Some(offset) = run.offset else {
            let why = "File contains external, encrypted or compressed clusters.";
            return Err(failure(why));
        };
        let name = chain.names.get(run.depth).map_or("", String::as_str);
        let name = one_line(name);
        text += &row(&number(run.at), &number(run.len), &number(offset), &name);
    }
    Ok(text)
}
