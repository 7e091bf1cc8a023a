//! Disks in repositories of restic, as `docs/restic.md` shows them.

use std::fs;
use std::process::Command;

use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};

use crate::served_disk::{LIMIT, OURS, blockhaul, succeed};

const PAGE: &str = include_str!("../../../../../docs/restic.md");

/// Runs the blocks of commands of the page in a directory with a disk at `images/vm.raw`.
fn carry_out_the_page(scratch: &ScratchDir, restic: &tools::PeerProgram) -> String {
    fs::write(scratch.file("password"), "secret\n").unwrap();
    let images = scratch.file("images").display().to_string();
    let blocks = PAGE.split("```console\n").skip(1);
    let lines = blocks.flat_map(|block| block.split("```").next().unwrap().lines());
    let lines: Vec<_> = lines.map(|line| line.replace("/var/images", &images)).collect();
    assert_eq!(lines.len(), 14, "{lines:?}");
    let folder = |program: &std::path::Path| program.parent().unwrap().display().to_string();
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{}:{path}", folder(OURS.as_ref()), folder(restic.program()));
    let mut shell = Command::new("sh");
    shell.args(["-ec", &lines.join("\n")]).current_dir(scratch.path()).env("PATH", path);
    shell.env("RESTIC_CACHE_DIR", scratch.file("cache"));
    let output = tools::output(&mut shell, LIMIT).unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn the_page_reads_a_backup_and_peers_read_it_from_a_server() {
    let [restic, fio, nbdcopy] = ["restic", "fio", "nbdcopy"].map(tools::PeerProgram::require);
    let (Some(restic), Some(fio), Some(nbdcopy)) = (restic, fio, nbdcopy) else { return };
    let scratch = ScratchDir::new().unwrap();
    let images = scratch.file("images");
    fs::create_dir(&images).unwrap();
    let disk = images.join("vm.raw");
    // fio's blocks can be verified; the rest is random bytes and zeroes.
    let job = |more: &[&str]| {
        let mut command = fio.command();
        command.args(["--name=a", "--bs=4k", "--size=8M", "--verify=crc32c", "--verify_fatal=1"]);
        command.args(more).current_dir(scratch.path());
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    };
    let file = format!("--filename={}", disk.display());
    job(&["--ioengine=psync", "--rw=write", "--do_verify=0", &file]);
    let mut bytes = fs::read(&disk).unwrap();
    bytes.extend(Rng::new(1).disk(16 << 20, 3 << 20, 40));
    fs::write(&disk, &bytes).unwrap();

    let printed = carry_out_the_page(&scratch, &restic);
    assert!(printed.contains("snapshot ") && printed.contains(", tags weekly"), "{printed}");
    assert!(printed.contains("no errors were found"), "{printed}");
    assert!(fs::read(scratch.file("new.raw")).unwrap() == bytes);

    let place = |options: &str| {
        let (repo, password) = (scratch.file("backups"), scratch.file("password"));
        let disk = disk.display();
        format!(
            "restic:{}#latest{disk}?tag=weekly&password-file={}{options}",
            repo.display(),
            password.display()
        )
    };
    let socket = scratch.socket("nbd");
    let server =
        PeerServer::blockhaul(OURS.as_ref(), &socket, &["--readonly", &place("&cache=4M")])
            .unwrap();
    let copied = scratch.file("copied.raw");
    let mut copy = nbdcopy.command();
    let output = tools::output(copy.arg(server.uri("")).arg(&copied), LIMIT).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fs::read(&copied).unwrap() == bytes);
    let uri = format!("--uri={}", server.uri(""));
    job(&["--ioengine=nbd", "--rw=randread", "--iodepth=8", &uri]);

    let list = succeed(&["info", "--list", "--json", &place("").replace("vm.raw", "")]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list["objects"][0]["size"], bytes.len());
    let name = list["objects"][0]["name"].as_str().unwrap().to_owned();
    assert_eq!(name[8..], disk.display().to_string());
    succeed(&["compare", &place("").replace("latest", &name[..8]), disk.to_str().unwrap()]);

    // A copy goes on only from the snapshot with which it began.
    let [journal, target] = ["j", "later.raw"].map(|name| scratch.file(name).display().to_string());
    let source = place("");
    let copy = ["copy", "--journal", &journal, "--rate=8M", &source, &target];
    let mut begun = Command::new(OURS).args(copy).spawn().unwrap();
    tools::until("the journal exists", || fs::metadata(&journal).is_ok_and(|data| data.len() > 0));
    begun.kill().unwrap();
    begun.wait().unwrap();
    let mut backup = restic.command();
    backup
        .args(["backup", "--quiet", "--tag", "weekly", "-r"])
        .arg(scratch.file("backups"))
        .arg("--password-file");
    backup
        .arg(scratch.file("password"))
        .arg(&images)
        .env("RESTIC_CACHE_DIR", scratch.file("cache"));
    let output = tools::output(&mut backup, LIMIT).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let again = blockhaul(&copy);
    let said = text(&again.stderr);
    assert!(!again.status.success() && said.contains("in the version"), "{said}");
    succeed(&["copy", "--journal", &journal, "--restart", &source, &target]);
    assert!(fs::read(&target).unwrap() == bytes);
}

#[test]
fn what_is_wrong_with_a_repository_is_said_with_a_remedy() {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.path().display().to_string();
    let fails = |spec: &str, parts: &[&str]| {
        let mut command = Command::new(OURS);
        for name in ["RESTIC_PASSWORD", "RESTIC_PASSWORD_FILE", "RESTIC_PASSWORD_COMMAND"] {
            command.env_remove(name);
        }
        let output = tools::output(command.args(["info", spec]), LIMIT).unwrap();
        let message = text(&output.stderr);
        assert!(!output.status.success(), "{spec}");
        assert!(parts.iter().all(|part| message.contains(part)), "{spec}: {message}");
    };
    fails(&format!("restic:{path}#latest/disk"), &["no password", "RESTIC_PASSWORD_FILE"]);
    fails("restic:#latest/disk", &["no repository", "restic:DIRECTORY#"]);
    for place in ["sftp:user@host:/srv/repo", "s3:s3.amazonaws.com/b/vms", "rest:host:8000/vms"] {
        fails(&format!("restic:{place}#latest/disk"), &["is no place that is supported", "s3://"]);
    }
    let password = "password-command=echo%20x";
    fails(&format!("restic:{path}#latest/disk?{password}"), &["no file config", "restic init"]);
    fails(&format!("restic:{path}?password-command=false"), &["failed: exit status: 1"]);
    let both = format!("restic:{path}?{password}&password-file=x");
    fails(&both, &["exclude each other"]);
    let target = format!("restic:{path}#latest/disk?{password}");
    let output = blockhaul(&["copy", "sample:1M", &target]);
    assert!(text(&output.stderr).contains("read-only"), "{}", text(&output.stderr));
}

/// A repository that restic has written to S3, at a name and at the root of a bucket.
#[cfg(feature = "remote")]
pub fn repositories_in_s3_are_read(server: &crate::remote::ObjectServer) {
    let Some(restic) = tools::PeerProgram::require("restic") else { return };
    let disk = server.disk(9);
    let disk = disk.to_str().unwrap();
    fs::write(server.scratch.file("password"), "secret").unwrap();
    for (repository, place) in
        [("disks/some/backups", "s3://disks/some/backups"), ("open", "s3://open")]
    {
        let run = |words: &[&str]| {
            let mut command = restic.command();
            command.args(words).args(["--no-cache", "--password-file", "password"]);
            command.args(["--repo", &format!("s3:{}/{repository}", server.endpoint())]);
            command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "testtest");
            let output = tools::output(command.current_dir(server.scratch.path()), LIMIT).unwrap();
            assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        };
        run(&["init"]);
        run(&["backup", "disk.raw"]);
        let file = format!("restic:{place}#latest/disk.raw?password-file=password");
        server.succeed(&["compare", &format!("{file}&connections=4"), disk]);
        assert!(server.succeed(&["map", &file]).contains("hole"));
        let list =
            server.succeed(&["info", "--list", &format!("restic:{place}?password-file=password")]);
        assert!(list.trim_end().ends_with("/disk.raw"), "{list}");
        server.refuse(&["info", &format!("{file}&connection=4")], "unknown option");
    }
    let absent = "restic:s3://disks/other#latest/disk.raw?password-command=echo%20x";
    server.refuse(&["info", absent], "no file config");
    let file = "restic:ftp://disks/other#latest/disk.raw?password-command=echo%20x";
    server.refuse(&["info", file], "choose s3://");
}
