//! The files that doors lead to, and what each of them must contain.

use std::fs;
use std::path::PathBuf;

use blockhaul_testkit::history::History;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::ScratchDir;

use crate::served_disk::succeed;

/// Bytes of each disk.
pub const SIZE: usize = 512 << 10;

/// What is in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Raw,
    Image,
    /// An image over the file `base.raw`.
    Overlay,
}

/// How a device uses a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As what it is.
    Own,
    /// The bytes of an image.
    Bytes,
    /// An image that `as-qcow2:` makes of the bytes.
    Made,
}

/// A file, which may be missing.
pub struct File {
    pub name: &'static str,
    pub kind: Kind,
    /// The disk in it; none: nobody knows.
    pub history: Option<History>,
    /// What the file itself had when nothing wrote to it.
    pub rest: Option<blake3::Hash>,
    /// Options of a new image.
    pub options: String,
}

/// All files, in a directory of their own.
pub struct Files {
    pub scratch: ScratchDir,
    pub all: Vec<File>,
}

/// The place of `base.raw`.
pub const BASE: usize = 7;

const LAYOUT: &[(&str, Kind, bool)] = &[
    ("r0.raw", Kind::Raw, true),
    ("r1.raw", Kind::Raw, true),
    ("r2.raw", Kind::Raw, true),
    ("r3.raw", Kind::Raw, false),
    ("q0.qcow2", Kind::Image, true),
    ("q1.qcow2", Kind::Image, true),
    ("q2.qcow2", Kind::Image, false),
    ("base.raw", Kind::Raw, true),
    ("o0.qcow2", Kind::Overlay, true),
    ("o1.qcow2", Kind::Overlay, true),
];

impl Files {
    pub fn new(rng: &mut Rng) -> Files {
        let scratch = ScratchDir::new().unwrap();
        fs::create_dir(scratch.file("files")).unwrap();
        let file = |&(name, kind, _): &(&'static str, Kind, bool)| File {
            name,
            kind,
            history: None,
            rest: None,
            options: String::new(),
        };
        let mut files = Files { scratch, all: LAYOUT.iter().map(file).collect() };
        for (place, &(_, kind, is_there)) in LAYOUT.iter().enumerate() {
            files.all[place].options = options(rng, kind);
            if !is_there {
                continue;
            }
            match kind {
                Kind::Raw => {
                    let bytes = rng.disk(SIZE, 40_000, 70);
                    fs::write(files.path(place), &bytes).unwrap();
                    files.all[place].history = Some(History::new(&bytes));
                }
                Kind::Image => {
                    succeed(&["create", &files.new_image(place), &SIZE.to_string()]);
                    files.all[place].history = Some(History::new(&vec![0; SIZE]));
                }
                Kind::Overlay => {
                    succeed(&["create", &files.new_image(place), &SIZE.to_string()]);
                    let below = fs::read(files.path(BASE)).unwrap();
                    files.all[place].history = Some(History::new(&below));
                }
            }
        }
        files
    }

    pub fn folder(&self) -> PathBuf {
        self.scratch.file("files")
    }

    pub fn path(&self, file: usize) -> String {
        let path = self.folder().join(self.all[file].name);
        path.to_str().unwrap().to_string()
    }

    pub fn exists(&self, file: usize) -> bool {
        fs::exists(self.path(file)).unwrap()
    }

    /// One of the names of a file.
    fn any_path(&self, rng: &mut Rng, file: usize) -> String {
        let path = self.path(file);
        if !self.exists(file) {
            return path;
        }
        match rng.below(4) {
            0 => {
                let link = format!("{path}.link");
                if !fs::exists(&link).unwrap() {
                    fs::hard_link(&path, &link).unwrap();
                }
                link
            }
            1 => {
                let symbolic = format!("{path}.symbolic");
                if fs::symlink_metadata(&symbolic).is_err() {
                    std::os::unix::fs::symlink(&path, &symbolic).unwrap();
                }
                symbolic
            }
            _ => path,
        }
    }

    /// A description of the device, by one of its names.
    pub fn device(&self, rng: &mut Rng, file: usize, form: Form) -> String {
        let path = self.any_path(rng, file);
        match (form, self.all[file].kind) {
            (Form::Own, Kind::Raw) if rng.chance(50) => path,
            (Form::Own, Kind::Raw) | (Form::Bytes, _) => format!("file:{path}"),
            (Form::Made, _) => format!("as-qcow2:{path}"),
            (Form::Own, kind) => self.image(&path, kind),
        }
    }

    /// A device that has a file twice.
    pub fn twice(&self, rng: &mut Rng, file: usize) -> String {
        let [one, other] = [(); 2].map(|()| self.any_path(rng, file));
        let scheme = rng.pick(&["split", "partitioning"]);
        format!("{scheme}:file:{one},file:{other}")
    }

    /// The device by its own name.
    pub fn plain_device(&self, file: usize) -> String {
        let path = self.path(file);
        match self.all[file].kind {
            Kind::Raw => path,
            kind => self.image(&path, kind),
        }
    }

    fn image(&self, path: &str, kind: Kind) -> String {
        match kind {
            Kind::Overlay => format!("qcow2:{path}?backing={}", self.path(BASE)),
            _ => format!("qcow2:{path}"),
        }
    }

    /// An image that is about to be made.
    fn new_image(&self, file: usize) -> String {
        let device = self.plain_device(file);
        let options = &self.all[file].options;
        if device.contains('?') {
            format!("{device}&{options}")
        } else {
            format!("{device}?{options}")
        }
    }

    /// Removes a file and its links.
    pub fn remove(&mut self, file: usize) {
        let path = self.path(file);
        for name in [format!("{path}.link"), format!("{path}.symbolic"), path] {
            let _ = fs::remove_file(name);
        }
        self.all[file].history = None;
        self.all[file].rest = None;
    }

    /// Somebody may write to a file from now on.
    pub fn is_opened_for_writing(&mut self, file: usize) {
        self.all[file].rest = None;
    }

    /// Nobody knows the disk in a file any more, nor those of images over it.
    pub fn is_unknown(&mut self, file: usize) {
        self.all[file].history = None;
        self.all[file].rest = None;
        self.has_changed(file);
    }

    /// What is under images has changed.
    pub fn has_changed(&mut self, file: usize) {
        if file == BASE {
            let overlays = self.all.iter_mut().filter(|one| one.kind == Kind::Overlay);
            overlays.for_each(|overlay| overlay.history = None);
        }
    }
}

fn options(rng: &mut Rng, kind: Kind) -> String {
    if kind == Kind::Raw {
        return String::new();
    }
    let cluster = *rng.pick(&["512", "4k", "16k", "64k", "256k"]);
    let mut options = format!("cluster={cluster}");
    match rng.below(5) {
        0 => options += "&version=2",
        1 => options += &format!("&refcount-bits={}", rng.pick(&[1, 2, 8, 64])),
        2 => options += "&lazy-refcounts=on",
        3 if !["512", "4k"].contains(&cluster) => options += "&subclusters=on",
        _ => {}
    }
    options
}
