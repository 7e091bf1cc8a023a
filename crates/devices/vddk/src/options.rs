//! Parameters of `vddk:`, with the names and meanings of nbdkit-vddk-plugin(1).

use std::ffi::{CString, OsString};
use std::path::PathBuf;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Param, ParamKind, ParamValues, parse_options, percent_decode};

use crate::library::{DiskLogin, NewDisk, SECTOR};
use crate::secret;

/// The environment variables of secrets that are not given as parameters.
pub(crate) const PASSWORD: &str = "BLOCKHAUL_VDDK_PASSWORD";
pub(crate) const COOKIE: &str = "BLOCKHAUL_VDDK_COOKIE";

/// The folder of the library if none is given.
const FOLDER: &str = "/usr/lib64/vmware-vix-disklib";

/// Flags of an opened disk.
const UNBUFFERED: u32 = 1;
pub(crate) const SINGLE_LINK: u32 = 2;
pub(crate) const READ_ONLY: u32 = 4;

const ADAPTERS: &[&str] = &["ide", "scsi-buslogic", "scsi-lsilogic"];
const HARDWARE: &[(&str, u16)] = &[
    ("workstation4", 3),
    ("workstation5", 4),
    ("workstation6", 6),
    ("esx30", 4),
    ("esx4x", 7),
    ("esx50", 8),
    ("esx51", 9),
    ("esx55", 10),
    ("esx60", 11),
    ("esx65", 13),
];
const TYPES: &[&str] = &[
    "monolithic-sparse",
    "monolithic-flat",
    "split-sparse",
    "split-flat",
    "vmfs-flat",
    "stream-optimized",
    "vmfs-thin",
    "vmfs-sparse",
];
const COMPRESSIONS: &[(&str, u32)] = &[("none", 0), ("zlib", 16), ("fastlz", 32), ("skipz", 64)];

const fn text(name: &'static str, doc: &'static str) -> Param {
    Param { name, kind: ParamKind::Text, default: None, doc }
}

const fn switch(name: &'static str, doc: &'static str) -> Param {
    Param { name, kind: ParamKind::Switch, default: Some("off"), doc }
}

/// All parameters.
pub(crate) const PARAMS: &[Param] = &[
    Param {
        name: "libdir",
        kind: ParamKind::Text,
        default: Some(FOLDER),
        doc: "Directory of VMware's VDDK.",
    },
    text("server", "Name of the ESXi host or vCenter server."),
    text("user", "Login name."),
    text(
        "password",
        "Password, +FILE, - (terminal) or -FD [default: variable BLOCKHAUL_VDDK_PASSWORD].",
    ),
    text("cookie", "Session cookie [default: variable BLOCKHAUL_VDDK_COOKIE]."),
    text("vm", "Virtual machine: moref=ID, or its path."),
    text("thumbprint", "SSL thumbprint of the server."),
    text("snapshot", "Managed object reference of a snapshot."),
    text("transports", "Transport modes, in order: nbdssl:nbd:file."),
    Param { name: "port", kind: ParamKind::Number, default: None, doc: "Port of the server." },
    Param { name: "nfchostport", kind: ParamKind::Number, default: None, doc: "Port for NFC." },
    text("file", "Path of the disk; the same as the name after vddk:."),
    text("config", "Configuration file of the library."),
    Param {
        name: "compression",
        kind: ParamKind::Choice(&["none", "zlib", "fastlz", "skipz"]),
        default: Some("none"),
        doc: "Compression between library and server.",
    },
    switch("single-link", "Read this link of a chain of disks only."),
    switch("unbuffered", "Bypass the cache of the host."),
    switch("create", "Create a local disk."),
    Param {
        name: "create-size",
        kind: ParamKind::Size,
        default: None,
        doc: "Size of a created disk.",
    },
    Param {
        name: "create-type",
        kind: ParamKind::Choice(TYPES),
        default: Some("monolithic-sparse"),
        doc: "Type of a created disk.",
    },
    Param {
        name: "create-adapter-type",
        kind: ParamKind::Choice(ADAPTERS),
        default: Some("scsi-buslogic"),
        doc: "Adapter of a created disk.",
    },
    text("create-hwversion", "Hardware version of a created disk [default: workstation5]."),
    text("vimapiver", "Ignored."),
    text("noreexec", "Ignored."),
    text("save", "Keep the allocated blocks in this file for the next run; read-only disks only."),
    text(
        "changes",
        "File with JSON of QueryChangedDiskAreas, shown as metadata context qemu:dirty-bitmap:changes.",
    ),
    text("change-id", "State of the disk that save= belongs to, such as VMware's change ID."),
    text("exports", "Used between processes of this program."),
    Param {
        name: "isolate",
        kind: ParamKind::Switch,
        default: Some("on"),
        doc: "Run the library in a process of its own.",
    },
];

/// Checked parameters.
pub(crate) struct VddkOptions {
    /// The path of the disk.
    pub(crate) file: String,
    pub(crate) c_file: CString,
    pub(crate) folder: PathBuf,
    pub(crate) config: Option<CString>,
    /// Flags for opening.
    pub(crate) flags: u32,
    pub(crate) create: Option<NewDisk>,
    pub(crate) isolate: bool,
    /// The file for the allocated blocks.
    pub(crate) save: Option<PathBuf>,
    pub(crate) change_id: Option<String>,
    /// File with the changed areas.
    pub(crate) changes: Option<PathBuf>,
    pub(crate) access: ServerAccess,
}

/// How the disk is reached.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct ServerAccess {
    pub(crate) server: Option<CString>,
    user: Option<CString>,
    password: Option<CString>,
    cookie: Option<CString>,
    machine: Option<CString>,
    thumbprint: Option<CString>,
    pub(crate) snapshot: Option<CString>,
    transports: Option<CString>,
    port: u16,
    nfc_port: u16,
}

fn usage(text: impl Into<String>) -> Error {
    Error::new(Kind::Usage, format!("vddk: {}", text.into()))
}

impl VddkOptions {
    /// Parses the text after the scheme: `PATH?key=value&…`.
    ///
    /// # Errors
    /// A wrong or missing parameter; a password that cannot be read.
    pub(crate) fn parse(text: &str) -> Result<VddkOptions> {
        let (path, options) = text.split_once('?').unwrap_or((text, ""));
        let args = ParamValues::check("vddk", PARAMS, &parse_options(options)?)?;
        let path = percent_decode(path)?;
        if args.text("exports").is_some() {
            return Err(usage("exports= is used between processes of this program"));
        }
        let file = match (path.as_str(), args.text("file")) {
            ("", Some(file)) if !file.is_empty() => file.to_string(),
            ("", _) => return Err(usage("the path of the disk is missing: write vddk:PATH")),
            (_, None) => path,
            (_, Some(_)) => return Err(usage("the path of the disk is given twice")),
        };
        let access = ServerAccess::parse(&args)?;
        let compression = args.text("compression").unwrap_or_default();
        let mut flags = COMPRESSIONS.iter().find(|row| row.0 == compression).map_or(0, |row| row.1);
        for (key, flag) in [("single-link", SINGLE_LINK), ("unbuffered", UNBUFFERED)] {
            flags |= if args.switch(key) { flag } else { 0 };
        }
        let create = if args.switch("create") { Some(new_disk(&args)?) } else { None };
        if create.is_some() && access.server.is_some() {
            return Err(usage("create=on is for local disks only"));
        }
        Ok(VddkOptions {
            c_file: c_string("file", &file)?,
            file,
            folder: args.text("libdir").unwrap_or(FOLDER).into(),
            config: optional(&args, "config")?,
            flags,
            create,
            isolate: args.switch("isolate"),
            save: args.text("save").map(PathBuf::from),
            change_id: args.text("change-id").map(String::from),
            changes: args.text("changes").map(PathBuf::from),
            access,
        })
    }

    /// Whether the parameters fit the purpose of opening the disk.
    ///
    /// # Errors
    /// `save=` or `changes=` for a disk that may change.
    pub(crate) fn check(&self, write: bool) -> Result<()> {
        if self.changes.is_some() && write {
            return Err(usage("changes= is for disks that are opened read-only"));
        }
        if self.save.is_none() {
            return Ok(());
        }
        if write {
            return Err(usage("save= is for disks that are opened read-only"));
        }
        let fixed = self.access.snapshot.is_some() || self.change_id.is_some();
        if self.access.server.is_some() && !fixed {
            Err(usage("save= needs snapshot= or change-id=: without, the disk may change"))
        } else {
            Ok(())
        }
    }

    /// A name for messages, without secrets.
    pub(crate) fn name(&self) -> String {
        format!("vddk:{}", self.file)
    }
}

impl ServerAccess {
    fn parse(args: &ParamValues) -> Result<ServerAccess> {
        let variable = |name: &str| std::env::var(name).ok();
        let password = match args.text("password") {
            Some(value) => Some(secret::read(value)?),
            None => variable(PASSWORD),
        };
        let cookie = args.text("cookie").map(String::from).or_else(|| variable(COOKIE));
        let port = |key| {
            let number = args.number(key).unwrap_or(0);
            u16::try_from(number).map_err(|_| usage(format!("{key}={number} is not a port")))
        };
        let secret =
            |name, text: Option<String>| text.map(|text| c_string(name, &text)).transpose();
        let access = ServerAccess {
            server: optional(args, "server")?,
            user: optional(args, "user")?,
            password: secret("password", password)?,
            cookie: secret("cookie", cookie)?,
            machine: optional(args, "vm")?,
            thumbprint: optional(args, "thumbprint")?,
            snapshot: optional(args, "snapshot")?,
            transports: optional(args, "transports")?,
            port: port("port")?,
            nfc_port: port("nfchostport")?,
        };
        access.check()?;
        Ok(access)
    }

    /// A remote disk needs all of server, user, password and machine.
    fn check(&self) -> Result<()> {
        let needed = [
            ("server", self.server.is_some()),
            ("user", self.user.is_some()),
            ("vm", self.machine.is_some()),
            ("password", self.password.is_some() || self.cookie.is_some()),
        ];
        // A password in the environment says nothing about this disk.
        let remote = needed[..3].iter().any(|(_, given)| *given);
        match needed.iter().find(|(_, given)| remote && !given) {
            Some((key, _)) => Err(usage(format!(
                "{key}= is missing: a disk of a server needs server, user, password and vm"
            ))),
            None => Ok(()),
        }
    }

    /// The same, for the library.
    pub(crate) fn login(&self, read_only: bool) -> DiskLogin<'_> {
        DiskLogin {
            machine: self.machine.as_deref(),
            server: self.server.as_deref(),
            thumbprint: self.thumbprint.as_deref(),
            user: self.user.as_deref(),
            password: self.password.as_deref(),
            cookie: self.cookie.as_deref(),
            port: self.port.into(),
            nfc_port: self.nfc_port.into(),
            snapshot: self.snapshot.as_deref(),
            transports: self.transports.as_deref(),
            read_only,
        }
    }

    /// What tells this disk from others of the same path.
    pub(crate) fn identity(&self) -> [&Option<CString>; 3] {
        [&self.server, &self.machine, &self.snapshot]
    }

    /// The secrets, for the environment of a process.
    pub(crate) fn environment(&self) -> Vec<(OsString, OsString)> {
        let secrets = [(PASSWORD, &self.password), (COOKIE, &self.cookie)];
        let known = secrets.into_iter().filter_map(|(name, value)| {
            let value = value.as_ref()?.to_str().ok()?;
            Some((name.into(), value.into()))
        });
        known.collect()
    }

    /// What is being connected to, for messages.
    pub(crate) fn place(&self) -> String {
        let show = |text: &Option<CString>| {
            text.as_ref().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
        };
        match &self.server {
            None => "local disks".to_string(),
            Some(_) => {
                let snapshot = match &self.snapshot {
                    None => String::new(),
                    Some(_) => format!(", snapshot {}", show(&self.snapshot)),
                };
                format!("{} as {}{snapshot}", show(&self.server), show(&self.user))
            }
        }
    }
}

/// The parameters of the library itself, which all disks of a process share.
const OF_LIBRARY: [&str; 2] = ["libdir", "config"];

/// The parameters, as written, for whose names `kept` holds.
fn parts(options: &str, kept: impl Fn(&str) -> bool) -> Vec<&str> {
    let named = |part: &&str| kept(part.split('=').next().unwrap_or_default());
    options.split('&').filter(|part| !part.is_empty()).filter(named).collect()
}

/// The text after the scheme for the process of a library, which serves several disks.
pub(crate) fn for_process(text: &str) -> String {
    let options = text.split_once('?').map_or("", |(_, options)| options);
    let mut kept = parts(options, |name| OF_LIBRARY.contains(&name));
    kept.extend(["isolate=off", "exports=disks"]);
    format!("?{}", kept.join("&"))
}

/// The name of a disk's export in that process: its text after the scheme, without secrets.
pub(crate) fn for_export(text: &str) -> String {
    let (path, options) = text.split_once('?').unwrap_or((text, ""));
    let hidden = ["password", "cookie", "isolate"];
    let mut kept = parts(options, |name| !hidden.contains(&name));
    kept.push("isolate=off");
    format!("{path}?{}", kept.join("&"))
}

/// The library of [`for_process`], if this text is one of these.
///
/// # Errors
/// A wrong parameter.
pub(crate) fn several(text: &str) -> Result<Option<VddkOptions>> {
    let Some(options) = text.strip_prefix('?') else { return Ok(None) };
    if parts(options, |name| name == "exports").is_empty() {
        return Ok(None);
    }
    let kept = parts(options, |name| OF_LIBRARY.contains(&name)).join("&");
    // A path is needed, and not used.
    let separator = if kept.is_empty() { "" } else { "&" };
    VddkOptions::parse(&format!("none?{kept}{separator}isolate=off")).map(Some)
}

fn new_disk(args: &ParamValues) -> Result<NewDisk> {
    let size = args.size("create-size").filter(|size| *size > 0 && size.is_multiple_of(SECTOR));
    let size = size.ok_or_else(|| {
        usage("create=on needs create-size=SIZE, a multiple of 512 bytes above 0")
    })?;
    let number = |words: &[&str], key: &str| {
        let word = args.text(key).unwrap_or_default();
        let index = words.iter().position(|known| *known == word).unwrap_or(0);
        i32::try_from(index + 1).unwrap_or(1)
    };
    let hardware = match args.text("create-hwversion") {
        None => 4,
        Some(word) => match HARDWARE.iter().find(|row| row.0 == word) {
            Some(row) => row.1,
            None => word
                .parse()
                .map_err(|_| usage(format!("create-hwversion={word}: an unknown version")))?,
        },
    };
    Ok(NewDisk {
        disk_type: number(TYPES, "create-type"),
        adapter: number(ADAPTERS, "create-adapter-type"),
        hardware,
        sectors: size / SECTOR,
    })
}

fn optional(args: &ParamValues, key: &str) -> Result<Option<CString>> {
    args.text(key).map(|text| c_string(key, text)).transpose()
}

fn c_string(key: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| usage(format!("{key}: the value holds a zero byte")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_of_a_server_needs_all_of_its_parameters() {
        let remote = "server=esx&user=root&vm=moref%3D3&password=x";
        let options = VddkOptions::parse(&format!("[ds] a/b.vmdk?{remote}&port=1443")).unwrap();
        assert_eq!(options.file, "[ds] a/b.vmdk");
        assert_eq!(options.access.place(), "esx as root");
        assert_eq!(options.access.login(true).machine, Some(c"moref=3"));
        assert_eq!(options.access.login(true).port, 1443);
        for missing in ["server", "user", "vm"] {
            let parts: Vec<_> =
                remote.split('&').filter(|part| !part.starts_with(missing)).collect();
            let error = VddkOptions::parse(&format!("a?{}", parts.join("&"))).err().unwrap();
            assert!(error.text().contains(&format!("{missing}= is missing")), "{error}");
        }
        for wrong in ["", "?libdir=/x", "a?file=b", "a?port=99999", "a?create=on", "a?what=1"] {
            assert_eq!(VddkOptions::parse(wrong).err().unwrap().kind(), Kind::Usage, "{wrong}");
        }
        assert_eq!(VddkOptions::parse("?file=/x.vmdk").unwrap().file, "/x.vmdk");
    }

    #[test]
    fn flags_and_new_disks_have_the_numbers_of_the_library() {
        let text = "a?single-link=on&compression=fastlz&create=true&create-size=1M&\
                    create-type=vmfs-thin&create-hwversion=esx65";
        let options = VddkOptions::parse(text).unwrap();
        assert_eq!(options.flags, 2 | 32);
        let disk = NewDisk { disk_type: 7, adapter: 2, hardware: 13, sectors: 2048 };
        assert_eq!(options.create, Some(disk));
    }

    #[test]
    fn secrets_do_not_reach_the_command_line_of_the_process() {
        let text = "a?password=x&libdir=/v&cookie=y&isolate=on";
        assert_eq!(for_process(text), "?libdir=/v&isolate=off&exports=disks");
        assert_eq!(for_export(text), "a?libdir=/v&isolate=off");
        assert_eq!(for_export("a"), "a?isolate=off");
        assert!(several(text).unwrap().is_none() && VddkOptions::parse("a?exports=disks").is_err());
        assert_eq!(several(&for_process(text)).unwrap().unwrap().folder.to_str(), Some("/v"));
        assert!(several("?exports=disks").unwrap().is_some());
    }
}
