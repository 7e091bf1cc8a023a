//! `floppy:FOLDER`: a disk with a FAT file system with the contents of a directory, computed as it
//! is read.
//!
//! [`tree`] finds files and directories, [`names`] makes FAT names for them, [`fat`] lays out the
//! disk. Only its tables are stored; files are opened when they are read.

mod fat;
mod names;
mod tree;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, Flags, HOLE, Kind, Op, Pending, Reply,
    Request, Result, ZERO,
};
use blockhaul_catalog::{Backend, Opened, Opening, Param, ParamKind, Target};
use blockhaul_io::Buf;

use blockhaul_backends::support::operand;
use fat::{Layout, Part, What};
use tree::Tree;

/// Maximum number of parts and gaps in one extents reply.
const RUNS_MAX: usize = 4096;

/// The backend `floppy:FOLDER`.
pub struct Floppy;

impl Backend for Floppy {
    fn schemes(&self) -> &'static [&'static str] {
        &["floppy"]
    }

    fn operand(&self) -> &'static str {
        "DIR"
    }

    fn summary(&self) -> &'static str {
        "a disk with a FAT file system that contains the files of a directory; the directory must not \
         change while it is served; symbolic links and special files are skipped; read-only, writable with \
         the layer cow"
    }

    fn example(&self) -> &'static str {
        r#"
mkdir files && echo hello > files/hello.txt
blockhaul serve floppy:files --run 'blockhaul copy "$uri" floppy.raw'
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[
                Param {
                    name: "label",
                    kind: ParamKind::Text,
                    default: Some("BLOCKHAUL"),
                    doc: "Label of the file system, at most 11 ASCII characters.",
                },
                Param {
                    name: "size",
                    kind: ParamKind::Size,
                    default: None,
                    doc: "Size of the disk [default: as small as possible, without free space].",
                },
            ]
        }
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move {
            operand::source_only(&target)?;
            let made = blockhaul_io::offload(move || open(&target)).await;
            made.map_err(|_| Error::new(Kind::Io, "floppy: was not made"))?
        })
    }
}

fn open(target: &Target) -> Result<Opened> {
    let path = target.path();
    if path.as_os_str().is_empty() {
        return Err(Error::new(Kind::Usage, "floppy: has no directory: write floppy:DIR"));
    }
    // A background server has another working directory when it reads the files.
    let path = std::fs::canonicalize(&path).map_err(|error| {
        Error::system(format!("floppy: cannot open the directory {}", path.display()), error)
    })?;
    let text = target.args.text("label").unwrap_or_default();
    if text.len() > 11 || !text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        let text = format!("floppy: label {text:?} is more than 11 ASCII characters");
        return Err(Error::new(Kind::Usage, text));
    }
    let mut label = [b' '; 11];
    label[..text.len()].copy_from_slice(text.as_bytes());
    let tree = Tree::of(&path)?;
    let files = tree.files.iter().map(|file| file.id).collect();
    let layout = fat::layout(tree, label, target.args.size("size"))?;
    let facts = Facts {
        can: Can::EXTENTS | Can::FLUSH | Can::MULTI_CONN,
        contexts: vec![BASE_ALLOCATION.to_string()],
        files,
        ..Facts::new(operand::name(target), layout.size)
    };
    let device = FloppyDevice { facts: Arc::new(facts), layout: Arc::new(layout) };
    Ok(Opened::from(Arc::new(device) as Arc<dyn Device>))
}

struct FloppyDevice {
    facts: Arc<Facts>,
    layout: Arc<Layout>,
}

impl Layout {
    /// The parts that a range touches.
    fn within(&self, at: u64, end: u64) -> impl Iterator<Item = &Part> {
        let first = self.parts.partition_point(|part| part.at + part.len <= at);
        self.parts[first..].iter().take_while(move |part| part.at < end)
    }

    /// Reads a range; blocks if there are files.
    fn read(&self, at: u64, mut out: Buf) -> Result<Buf> {
        out.fill(0);
        let end = at + out.len() as u64;
        for part in self.within(at, end) {
            let from = part.at.max(at);
            let to = (part.at + part.len).min(end);
            let out = &mut out[(from - at) as usize..(to - at) as usize];
            let from = from - part.at;
            match &part.what {
                What::Bytes(bytes) => {
                    out.copy_from_slice(&bytes[from as usize..from as usize + out.len()]);
                }
                What::File(path) => {
                    let read = File::open(path).and_then(|file| file.read_exact_at(out, from));
                    read.map_err(|error| {
                        Error::system(format!("cannot read {}", path.display()), error)
                    })?;
                }
            }
        }
        Ok(out)
    }

    fn extents(&self, at: u64, len: u64, most: usize) -> Extents {
        let mut extents = Extents::new();
        let mut next = at;
        let end = at + len;
        for part in self.within(at, end) {
            if extents.len() >= most {
                return extents;
            }
            if part.at > next {
                extents.push(part.at - next, HOLE | ZERO);
                next = part.at;
            }
            let to = (part.at + part.len).min(end);
            extents.push(to - next, 0);
            next = to;
        }
        if next < end && extents.len() < most {
            extents.push(end - next, HOLE | ZERO);
        }
        extents
    }
}

impl Device for FloppyDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => {
                let layout = self.layout.clone();
                if layout.within(at, at + len).next().is_none() {
                    return Pending::ready(Ok(Reply::Hole));
                }
                let out = room.into_buf();
                Pending::start(async move {
                    let read = blockhaul_io::offload(move || layout.read(at, out)).await;
                    let out =
                        read.map_err(|_| Error::new(Kind::Io, "the read was cancelled"))??;
                    Ok(Reply::Data(out.into()))
                })
            }
            Op::Extents(contexts) => {
                let most = if flags.contains(Flags::ONE_EXTENT) { 1 } else { RUNS_MAX };
                let mut extents = self.layout.extents(at, len, most);
                if flags.contains(Flags::ONE_EXTENT) {
                    extents.first_only();
                }
                let lists = contexts.iter().map(|_| extents.clone()).collect();
                Pending::ready(Ok(Reply::Extents(lists)))
            }
            Op::Write(_) | Op::Zero | Op::Trim => {
                Error::new(Kind::ReadOnly, "a disk made from a directory cannot be written").into()
            }
            Op::Flush | Op::Cache => Pending::ready(Ok(Reply::Done)),
        }
    }
}
