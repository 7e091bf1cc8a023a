//! Backups of a domain of libvirt, through `virsh`.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use blockhaul_block::Error;
use blockhaul_io::plain;
use blockhaul_transfer::one_line;
use tempfile::NamedTempFile;

use super::request::{
    BackupNames, IdleDisk, MachineDisk, MachineRequest, check_known, newest_checkpoint, refused,
};
use crate::error::{BackupError, BackupStep, Result};

/// The file beside the stores with the description of the domain.
const DOMAIN: &str = "domain.xml";
/// Number of times that a backup is looked at until it has ended, and the interval.
const LOOKS: u32 = 300;
const LOOK: Duration = Duration::from_millis(200);

/// A domain.
pub(super) struct LibvirtMachine {
    domain: String,
    connect: Option<String>,
}

/// A disk of a domain.
struct DomainDisk {
    target: String,
    /// The image can keep a bitmap.
    has_bitmaps: bool,
    /// The checkpoint of the newest point, if the domain has it.
    parent: Option<String>,
}

impl LibvirtMachine {
    pub(super) fn new(domain: &str, connect: Option<&str>) -> LibvirtMachine {
        LibvirtMachine { domain: domain.to_string(), connect: connect.map(str::to_string) }
    }

    /// Checks that the domain can be backed up. Nothing changes.
    pub(super) fn check(&self, request: &MachineRequest) -> Result<()> {
        self.targets(&request.disks).map(drop)
    }

    /// Begins the point in time of all disks.
    pub(super) fn begin(
        &mut self,
        request: &MachineRequest,
        names: &BackupNames,
    ) -> Result<Vec<MachineDisk>> {
        let targets = self.targets(&request.disks)?;
        self.end_own_backup(names)?;
        let stores: Vec<_> = targets.iter().map(|target| request.stores.join(target)).collect();
        self.remove_checkpoints(names)?;
        let checkpoints = self.checkpoints()?;
        let mut disks = Vec::with_capacity(targets.len());
        for (target, store) in targets.into_iter().zip(&stores) {
            let parent = newest_checkpoint(store)?.filter(|newest| checkpoints.contains(newest));
            let has_bitmaps = self.has_bitmaps(&target)?;
            disks.push(DomainDisk { target, has_bitmaps, parent });
        }
        self.begin_moment(request, names, &disks)?;
        let made = disks.into_iter().zip(stores).map(|(disk, store)| {
            Ok(MachineDisk {
                source: names.source(&disk.target)?,
                name: disk.target,
                store,
                bitmap: disk.parent,
                has_checkpoint: disk.has_bitmaps,
            })
        });
        made.collect::<Result<Vec<_>>>().inspect_err(|_| {
            let _ = self.abort();
        })
    }

    /// The disks that are backed up, before the point in time begins.
    pub(super) fn idle_disks(
        &self,
        request: &MachineRequest,
        names: &BackupNames,
    ) -> Result<Vec<IdleDisk>> {
        let targets = self.targets(&request.disks)?;
        self.has_own_backup(names)?;
        let checkpoints: Vec<_> = self.checkpoints()?.into_iter().collect();
        let disk = |name: String| {
            let told = self.virsh(&["domblkinfo", &self.domain, &name])?;
            let size = capacity(&told).ok_or_else(|| {
                refused(format!(
                    "virsh domblkinfo of {} does not say the size of {name}",
                    self.domain
                ))
            })?;
            let checkpoint = self.has_bitmaps(&name)?.then(|| names.checkpoint.clone());
            Ok(IdleDisk { name, size, checkpoints: checkpoints.clone(), checkpoint })
        };
        targets.into_iter().map(disk).collect()
    }

    /// Ends the point in time.
    pub(super) fn end(&self, names: &BackupNames) -> Result<()> {
        self.abort()?;
        self.remove_checkpoints(names)
    }

    /// The targets of the disks that are backed up.
    fn targets(&self, wanted: &[String]) -> Result<Vec<String>> {
        let listed = self.virsh(&["domblklist", "--details", &self.domain]);
        let listed = listed.map_err(|error| match error.remedy() {
            "" => {
                error.and("; virsh list --all shows the domains, --connect selects another libvirt")
            }
            _ => error,
        })?;
        let disks = disk_targets(&listed);
        check_known(wanted, &disks)?;
        self.check_runs()?;
        let is_wanted = |target: &&str| wanted.is_empty() || wanted.iter().any(|one| one == target);
        let targets: Vec<String> = disks.into_iter().filter(is_wanted).map(String::from).collect();
        if targets.is_empty() {
            return Err(refused(format!("the domain {} has no disk", self.domain)));
        }
        Ok(targets)
    }

    /// Refuses a domain that is shut off: QEMU makes the point in time.
    fn check_runs(&self) -> Result<()> {
        let state = self.virsh(&["domstate", &self.domain])?;
        if state.trim() != "shut off" {
            return Ok(());
        }
        let domain = &self.domain;
        let error = refused(format!("the domain {domain} is shut off, and QEMU makes the backup"));
        Err(error.and(&format!(
            "; start it (virsh start {domain}), or copy its disks (virsh domblklist {domain}) with blockhaul copy"
        )))
    }

    fn has_bitmaps(&self, target: &str) -> Result<bool> {
        let path = format!("//disk[target/@dev='{target}']/driver/@type");
        Ok(self.virsh(&["dumpxml", &self.domain, "--xpath", &path])?.contains("qcow2"))
    }

    fn checkpoints(&self) -> Result<HashSet<String>> {
        let listed = self.virsh(&["checkpoint-list", &self.domain, "--name"])?;
        let names = listed.lines().map(str::trim).filter(|name| !name.is_empty());
        Ok(names.map(String::from).collect())
    }

    /// Ends a backup that a run of this program has left when it was killed; refuses that of others.
    fn end_own_backup(&self, names: &BackupNames) -> Result<()> {
        if !self.has_own_backup(names)? {
            return Ok(());
        }
        log::warn!("a backup of {} that was interrupted is ended", self.domain);
        self.abort()
    }

    /// Whether a run of this program has left a backup; refuses that of others.
    fn has_own_backup(&self, names: &BackupNames) -> Result<bool> {
        let Ok(running) = self.virsh(&["backup-dumpxml", &self.domain]) else { return Ok(false) };
        if !running.contains(&*names.socket.to_string_lossy()) {
            let text = format!(
                "a backup of the domain {0} runs already: wait until it ends, or end it with virsh domjobabort {0}",
                self.domain
            );
            return Err(refused(text));
        }
        Ok(true)
    }

    /// Ends the backup, and waits until it has ended.
    fn abort(&self) -> Result<()> {
        self.virsh(&["domjobabort", &self.domain])?;
        for _ in 0..LOOKS {
            // There is none any more.
            if self.virsh(&["backup-dumpxml", &self.domain]).is_err() {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        Err(refused(format!("the backup of the domain {} has not ended in a minute", self.domain)))
    }

    /// Removes the checkpoints of this directory that no newest point names. libvirt merges their bits into the
    /// checkpoints that stay.
    fn remove_checkpoints(&self, names: &BackupNames) -> Result<()> {
        let needed = names.needed_checkpoints()?;
        let listed = self.checkpoints()?;
        for name in listed.iter().filter(|name| names.is_own(name) && !needed.contains(*name)) {
            self.virsh(&["checkpoint-delete", &self.domain, name])?;
        }
        Ok(())
    }

    /// Begins the backup, with frozen file systems if possible.
    fn begin_moment(
        &self,
        request: &MachineRequest,
        names: &BackupNames,
        disks: &[DomainDisk],
    ) -> Result<()> {
        let mut words = vec!["backup-begin".to_string(), self.domain.clone()];
        let mut documents = vec![("backup.xml", backup_xml(request, names, disks))];
        documents.extend(checkpoint_xml(names, disks).map(|text| ("checkpoint.xml", text)));
        for (name, text) in documents {
            let path = request.stores.join(name);
            std::fs::write(&path, text).map_err(|error| {
                let error = Error::system(format!("cannot write {}", path.display()), error);
                BackupError::of_store(BackupStep::OpenStore, &request.stores, error)
            })?;
            let path = std::path::absolute(&path).unwrap_or(path);
            words.push(path.to_string_lossy().into_owned());
        }
        self.save_domain(&request.stores);
        let is_frozen = request.freeze && self.freeze();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let begun = self.virsh(&words);
        if is_frozen && let Err(error) = self.virsh(&["domfsthaw", &self.domain]) {
            log::warn!("the file systems of {} may still be frozen: {error}", self.domain);
        }
        begun.map(drop)
    }

    /// Writes the description of the domain, with its passwords, beside the stores: `virsh define` makes the domain again
    /// from it. Without it there is still a backup.
    fn save_domain(&self, stores: &Path) {
        let described = self.virsh(&["dumpxml", "--inactive", "--security-info", &self.domain]);
        let saved = described.map_err(|error| error.to_string()).and_then(|text| {
            let written = NamedTempFile::new_in(stores).and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.as_file().sync_all()?;
                file.persist(stores.join(DOMAIN)).map_err(|error| error.error)
            });
            written.map_err(|error| plain(&error))
        });
        if let Err(why) = saved {
            log::warn!("the description of {} is not saved beside its backup: {why}", self.domain);
        }
    }

    /// Freezes the file systems of the guest; `false`: its agent does not answer.
    fn freeze(&self) -> bool {
        let frozen = self.virsh(&["domfsfreeze", &self.domain]);
        if let Err(error) = &frozen {
            log::info!("the backup is as after a power loss, because nothing was frozen: {error}");
        }
        frozen.is_ok()
    }

    fn virsh(&self, words: &[&str]) -> Result<String, BackupError> {
        let mut command = Command::new("virsh");
        command.arg("-q").env("LC_ALL", "C.UTF-8").stdin(std::process::Stdio::null());
        if let Some(uri) = &self.connect {
            command.args(["-c", uri]);
        }
        let output = command.args(words).output().map_err(|error| {
            let failed = refused(format!("cannot run virsh: {}", plain(&error)));
            failed.and("; install it (Debian: libvirt-clients)")
        })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = one_line(&reasons(&String::from_utf8_lossy(&output.stderr)));
        Err(refused(format!("virsh {} of {}: {said}", words[0], self.domain)))
    }
}

/// The lines of an error of virsh in one, the general reason first.
fn reasons(said: &str) -> String {
    let lines = said.lines().map(|line| line.strip_prefix("error: ").unwrap_or(line).trim());
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(": ")
}

/// The targets in the output of `domblklist --details`: type, device, target and source, of which only the last may
/// have spaces. Disks without a source, and devices that are no disks, are left out.
fn disk_targets(listed: &str) -> Vec<&str> {
    let target = |line| -> Option<&str> {
        let mut words = str::split_whitespace(line);
        let (_, device, target, source) =
            (words.next()?, words.next()?, words.next()?, words.next()?);
        (device == "disk" && source != "-").then_some(target)
    };
    listed.lines().filter_map(target).collect()
}

/// The size of a disk in bytes, in the output of `domblkinfo`.
fn capacity(told: &str) -> Option<u64> {
    told.lines().find_map(|line| line.strip_prefix("Capacity:")?.trim().parse().ok())
}

/// The description of the backup.
fn backup_xml(request: &MachineRequest, names: &BackupNames, disks: &[DomainDisk]) -> String {
    let mut text = format!(
        "<domainbackup mode='pull'>\n  <server transport='unix' socket='{}'/>\n  <disks>\n",
        escaped(&names.socket.to_string_lossy())
    );
    for DomainDisk { target, parent, .. } in disks {
        let changes = match parent {
            None => "backupmode='full'".to_string(),
            Some(parent) => {
                let parent = escaped(parent);
                format!("backupmode='incremental' incremental='{parent}' exportbitmap='{parent}'")
            }
        };
        let file = request.scratch.join(format!("{}{target}.scratch", names.prefix));
        let (target, file) = (escaped(target), escaped(&file.to_string_lossy()));
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "    <disk name='{target}' backup='yes' type='file' exportname='{target}' {changes}>\n      \
             <scratch file='{file}'/>\n    </disk>"
        );
    }
    text + "  </disks>\n</domainbackup>\n"
}

/// The description of the checkpoint; `None`: no disk can have one.
fn checkpoint_xml(names: &BackupNames, disks: &[DomainDisk]) -> Option<String> {
    if !disks.iter().any(|disk| disk.has_bitmaps) {
        return None;
    }
    let name = escaped(&names.checkpoint);
    let mut text = format!("<domaincheckpoint>\n  <name>{name}</name>\n  <disks>\n");
    for disk in disks {
        let kind = if disk.has_bitmaps { "bitmap" } else { "no" };
        let _ = writeln!(text, "    <disk name='{}' checkpoint='{kind}'/>", escaped(&disk.target));
    }
    Some(text + "  </disks>\n</domaincheckpoint>\n")
}

/// Text for XML.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('\'', "&apos;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::BackupErrorKind;
    use crate::machine::request::MachineAddress;

    #[test]
    fn only_disks_with_a_source_are_backed_up() {
        let listed = " file     disk     vda      /var/lib/my images/vm1.qcow2\n \
                      file     cdrom    sda      -\n file     cdrom    sdb      /iso/x.iso\n \
                      block    disk     vdb      /dev/vg/data\n network  disk   vdc   -\n\n";
        assert_eq!(disk_targets(listed), ["vda", "vdb"]);
    }

    #[test]
    fn sizes_are_read_from_what_virsh_prints() {
        let told = "Capacity:       1073741824\nAllocation:     208896\nPhysical:       196928\n\n";
        assert_eq!(capacity(told), Some(1 << 30));
        assert_eq!(capacity("Capacity:       1.000 GiB\n"), None);
    }

    fn request(stores: &Path) -> MachineRequest {
        MachineRequest {
            address: MachineAddress::Libvirt { domain: "vm1".into(), connect: None },
            stores: stores.into(),
            disks: Vec::new(),
            scratch: "/var/tmp/a&b".into(),
            freeze: true,
            time: "20261130T022000Z".into(),
        }
    }

    #[test]
    fn a_description_that_finds_no_space_says_so() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", folder.path().join("backup.xml")).unwrap();
        let request = request(folder.path());
        let names = BackupNames::new(&request).unwrap();
        let machine = LibvirtMachine::new("vm1", None);
        let error = machine.begin_moment(&request, &names, &[]).unwrap_err();
        assert_eq!(error.kind(), BackupErrorKind::Full);
        let said = error.to_string();
        assert!(said.contains("backup.xml") && said.contains("free some space"), "{said}");
    }

    #[test]
    fn errors_of_virsh_are_one_line() {
        let said =
            "error: failed to connect to the hypervisor\nerror: Failed to connect socket\n\n";
        assert_eq!(reasons(said), "failed to connect to the hypervisor: Failed to connect socket");
    }

    #[test]
    fn descriptions_name_each_disk_and_what_changed_since() {
        let request = request(Path::new("/srv/vm1"));
        let names = BackupNames::new(&request).unwrap();
        assert!(names.is_own(&names.checkpoint) && !names.is_own("monday"));
        let disk = |target: &str, has_bitmaps, parent: Option<&str>| DomainDisk {
            target: target.into(),
            has_bitmaps,
            parent: parent.map(String::from),
        };
        let disks = [disk("vda", true, Some("p1")), disk("vdb", false, None)];
        let text = backup_xml(&request, &names, &disks);
        assert!(text.contains("incremental='p1' exportbitmap='p1'>"), "{text}");
        assert!(
            text.contains(
                "<disk name='vdb' backup='yes' type='file' exportname='vdb' backupmode='full'>"
            ),
            "{text}"
        );
        assert!(text.contains("/var/tmp/a&amp;b/blockhaul-"), "{text}");
        let text = checkpoint_xml(&names, &disks).unwrap();
        assert!(text.contains("<disk name='vdb' checkpoint='no'/>"), "{text}");
        assert!(checkpoint_xml(&names, &disks[1..]).is_none());
    }
}
