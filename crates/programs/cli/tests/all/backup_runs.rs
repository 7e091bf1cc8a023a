//! What monitoring and programs learn of `pull`, `restore`, `chain` and `verify`: metrics and JSON, also of runs that
//! fail before they begin; rules about which points are kept; and runs that change nothing.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};
use serde_json::{Value, json};

use crate::pull::Machine;
use crate::served_disk::{OURS, blockhaul, succeed};

const LIMIT: Duration = Duration::from_secs(60);

/// The value of the metric that begins with this text.
#[track_caller]
fn metric(file: &Path, name: &str) -> f64 {
    let text = fs::read_to_string(file).unwrap();
    let line = text.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name}: {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// The status and the JSON of a command that prints some.
#[track_caller]
fn json_of(args: &[&str]) -> (Option<i32>, Value) {
    let output = blockhaul(args);
    let said = text(&output.stdout);
    let value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{args:?}: {said}"));
    (output.status.code(), value)
}

/// All files below a directory, with their contents and times.
fn files(folder: &Path) -> BTreeMap<String, (Vec<u8>, std::time::SystemTime)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let data = path.symlink_metadata().unwrap();
        let name = path.display().to_string();
        if data.is_dir() {
            found.insert(name, (Vec::new(), data.modified().unwrap()));
            found.extend(files(&path));
        } else if data.is_file() {
            found.insert(name, (fs::read(&path).unwrap(), data.modified().unwrap()));
        }
    }
    found
}

/// Runs a command that must leave all files of a directory as they are.
#[track_caller]
fn succeed_without_change(folder: &Path, args: &[&str]) -> String {
    let before = files(folder);
    let said = succeed(args);
    let after = files(folder);
    let changed: Vec<_> = before
        .keys()
        .chain(after.keys())
        .filter(|name| before.get(*name) != after.get(*name))
        .collect();
    assert!(changed.is_empty(), "{args:?} has changed {changed:?}");
    said
}

#[test]
fn the_collector_reads_metrics_whatever_the_umask_is() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.file("copy.prom");
    let words =
        format!("umask 077; \"$0\" copy null:1M null: --metrics textfile:{}", file.display());
    let mut shell = Command::new("sh");
    let output = tools::output(shell.args(["-c", &words, OURS]), LIMIT).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
}

#[test]
fn a_pull_that_fails_replaces_the_success_of_the_night_before() {
    let machine = Machine::new();
    let file = machine.scratch().file("pull.prom");
    let metrics = format!("--metrics=textfile:{}", file.display());
    machine.pull(&["--point", "monday", &metrics]);
    let run = "blockhaul_backup_exit_status{run=\"pull\",command=\"pull\"}";
    assert_eq!(metric(&file, run), 0.0);
    let store = format!("{{run=\"pull\",store=\"{}\"}}", machine.file("store"));
    let newest = metric(&file, &format!("blockhaul_backup_store_newest_point_time_seconds{store}"));
    assert_eq!(metric(&file, &format!("blockhaul_backup_store_points{store}")), 1.0);
    assert_eq!(metric(&file, "blockhaul_copy_exit_status{run=\"pull\"}"), 0.0);
    // The server is gone.
    let job = machine.file("job");
    let gone = fs::read_to_string(&job).unwrap().replace("socket=", "socket=/nosuch");
    fs::write(&job, gone).unwrap();
    let (status, value) = json_of(&["pull", &job, "--point", "tuesday", "--json", &metrics]);
    assert_eq!(
        (status, &value["exit_status"], &value["command"]),
        (Some(3), &3.into(), &"pull".into())
    );
    assert!(
        value["error"].as_str().unwrap().contains("disk vda: cannot open the source"),
        "{value}"
    );
    assert_eq!(metric(&file, run), 3.0);
    assert_eq!(
        metric(&file, &format!("blockhaul_backup_store_newest_point_time_seconds{store}")),
        newest
    );
    // The file of the pull cannot be read; a file that names its metrics itself is read.
    let (status, value) = json_of(&["pull", "/nosuch.toml", "--json", &metrics]);
    assert_eq!((status, &value["exit_status"]), (Some(3), &3.into()), "{value}");
    let own = machine.scratch().file("own.prom");
    let keys =
        format!("metrics = \"textfile:{}\"\n{}", own.display(), fs::read_to_string(&job).unwrap());
    fs::write(&job, keys).unwrap();
    assert_eq!(blockhaul(&["pull", &job]).status.code(), Some(3));
    assert_eq!(metric(&own, "blockhaul_backup_exit_status"), 3.0);
}

#[test]
fn a_backup_is_made_where_its_metrics_cannot_be_published() {
    let machine = Machine::new();
    let missing = machine.scratch().file("nosuch").join("pull.prom");
    let address = format!("--metrics=unix:{}", machine.scratch().socket("m").display());
    let metrics = format!("--metrics=textfile:{}", missing.display());
    let pulled =
        blockhaul(&["pull", &machine.file("job"), "--point", "monday", &metrics, &address]);
    let said = text(&pulled.stderr);
    assert_eq!(pulled.status.code(), Some(0), "{said}");
    let warning = format!("cannot write {}", missing.display());
    assert!(said.contains(&warning) && said.contains("create its directory first"), "{said}");
    let (status, value) = json_of(&["chain", "list", &machine.file("store"), "--json", &metrics]);
    assert_eq!((status, value["points"].as_array().map(Vec::len)), (Some(0), Some(1)), "{value}");
}

#[test]
fn restore_chain_and_verify_tell_programs_how_they_ended() {
    let machine = Machine::with_two_points();
    let store = machine.file("store");
    let file = machine.scratch().file("x.prom");
    let metrics = format!("--metrics=textfile:{}", file.display());
    let target = machine.file("target");
    let (status, value) = json_of(&["restore", &store, &target, "--json", &metrics]);
    assert_eq!(
        (status, &value["exit_status"], &value["error"]),
        (Some(0), &0.into(), &Value::Null)
    );
    assert_eq!(metric(&file, "blockhaul_backup_exit_status{run=\"x\",command=\"restore\"}"), 0.0);
    let (status, value) = json_of(&["restore", "/nosuch", &target, "--json", &metrics]);
    assert_eq!((status, &value["exit_status"]), (Some(3), &3.into()));
    assert!(value["error"].as_str().unwrap().starts_with("/nosuch does not exist"), "{value}");
    assert_eq!(metric(&file, "blockhaul_backup_exit_status"), 3.0);
    let (status, value) = json_of(&["chain", "check", &store, "--json", &metrics]);
    assert_eq!((status, &value["points"], &value["damage"]), (Some(0), &2.into(), &json!([])));
    fs::write(format!("{store}/000002.digests"), "x").unwrap();
    let (status, value) = json_of(&["chain", "check", &store, "--json", &metrics]);
    assert_eq!((status, &value["exit_status"]), (Some(8), &8.into()));
    assert!(value["damage"][0]["error"].as_str().unwrap().contains("000002.digests"), "{value}");
    assert_eq!(metric(&file, "blockhaul_backup_exit_status{run=\"x\",command=\"chain\"}"), 8.0);
    let (status, value) = json_of(&["chain", "abandon", &store, "--json"]);
    assert_eq!((status, &value["exit_status"]), (Some(2), &2.into()), "{value}");
    // A manifest.
    let (disk, manifest) = (machine.file("tuesday"), machine.file("manifest"));
    succeed(&["copy", "--manifest", &manifest, &disk, "null:"]);
    let (status, value) = json_of(&["verify", &disk, &manifest, "--json", &metrics]);
    assert_eq!(
        (status, &value["identical"], &value["command"]),
        (Some(0), &true.into(), &"verify".into())
    );
    let mut bytes = fs::read(&disk).unwrap();
    bytes[5 << 20] ^= 1;
    fs::write(&disk, bytes).unwrap();
    let (status, value) = json_of(&["verify", &disk, &manifest, "--json", &metrics]);
    assert_eq!((status, &value["identical"]), (Some(8), &false.into()), "{value}");
    assert!(value["differences"][0]["length"].as_u64() > Some(0), "{value}");
    assert_eq!(metric(&file, "blockhaul_backup_exit_status{run=\"x\",command=\"verify\"}"), 8.0);
}

/// Sets when the points of a store were made, in seconds since 1970, as an earlier pull would have.
fn set_times(store: &str, times: &[u64]) {
    let path = format!("{store}/manifest.json");
    let mut manifest: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for (point, time) in manifest["points"].as_array_mut().unwrap().iter_mut().zip(times) {
        point["created"] = (*time).into();
    }
    // The digest is that of the points in the order of their members.
    let points: Vec<blockhaul_store::BackupPoint> =
        serde_json::from_value(manifest["points"].clone()).unwrap();
    let digest = blake3::hash(&serde_json::to_vec(&points).unwrap()).to_hex().to_string();
    manifest["digest"] = digest.into();
    fs::write(&path, manifest.to_string()).unwrap();
}

/// A store with a full backup and six increments; each point is as its file of the same name.
fn week() -> (Machine, Vec<String>) {
    let machine = Machine::new();
    machine.begin_bitmap("p0");
    machine.keep("p0");
    machine.pull(&["--point", "p0"]);
    for number in 1..7 {
        let (parent, name) = (format!("p{}", number - 1), format!("p{number}"));
        machine.write(&format!("{number}M:2M"), "pattern", &name);
        machine.begin_bitmap(&name);
        machine.pull(&["--bitmap", &parent, "--point", &name]);
    }
    let names = (0..7).map(|number| format!("p{number}")).collect();
    (machine, names)
}

#[test]
fn points_are_kept_by_days_weeks_and_years() {
    let (machine, _) = week();
    let store = machine.file("store");
    let day = 86_400;
    // 2026-11-20 (Friday) to 2026-11-29, at noon; two on the last day.
    let start = 1_795_176_000;
    let times = [0, 1, 2, 3, 8, 9, 9].map(|days: u64| start + days * day);
    set_times(&store, &times);
    let folder = machine.scratch().path().to_path_buf();
    let rules = ["--keep-daily", "2", "--keep-weekly", "2"];
    let plan = [&["chain", "prune", &store, "--dry-run"], &rules[..]].concat();
    let said = succeed_without_change(&folder, &plan);
    let lines: Vec<_> = said.lines().collect();
    for (line, what) in [
        (0, "2026-11-20T12:00:00Z  p0  would be merged into p2"),
        (1, "p1  would be merged into p2"),
        (2, "p2  stays: weekly 2026-W47"),
        (3, "p3  would be merged into p4"),
        (4, "p4  stays: daily 2026-11-28"),
        (5, "p5  would be merged into p6"),
        (6, "p6  stays: daily 2026-11-29; weekly 2026-W48"),
    ] {
        assert!(lines[line].contains(what), "{what}: {said}");
    }
    assert!(said.contains("4 of 7 points would go"), "{said}");
    let (_, value) = json_of(&[&plan[..], &["--json"]].concat());
    assert_eq!((&value["dry_run"], &value["points"][2]["kept"]), (&true.into(), &true.into()));
    assert_eq!(value["points"][3]["merged_into"], "p4");
    let said = succeed(&[&["chain", "prune", &store], &rules[..]].concat());
    assert_eq!(said, "removed 4, kept 3; the oldest point is p2\n");
    machine.assert_restores(&["p2", "p4", "p6"]);
    assert!(succeed(&["chain", "check", &store]).contains("3 files are as they were written"));
    // The next increment finds its parent, and nothing more goes.
    machine.write("9M:1M", "pattern", "p7");
    machine.pull(&["--bitmap", "p6", "--point", "p7"]);
    machine.assert_restores(&["p2", "p4", "p6", "p7"]);
    let said = succeed(&[
        "chain",
        "prune",
        &store,
        "--keep-yearly",
        "unlimited",
        "--keep-within",
        "3650d",
    ]);
    assert!(said.starts_with("removed 0, kept 4"), "{said}");
    // The old option.
    let said = succeed(&["chain", "prune", &store, "--keep", "1", "--json"]);
    let value: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&value["removed"], &value["oldest"]), (&3.into(), &"p7".into()));
    machine.assert_restores(&["p7"]);
    for (args, said) in [
        (&["--keep-daily", "0"][..], "write a number from 1, or unlimited"),
        (&["--keep-within", "7x"], "write a duration such as 7d"),
        (&[], "required arguments"),
    ] {
        let output = blockhaul(&[&["chain", "prune", &store], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(said), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn dry_runs_of_backups_change_nothing() {
    let machine = Machine::with_two_points();
    let folder = machine.scratch().path().to_path_buf();
    let (store, job) = (machine.file("store"), machine.file("job"));
    let pull = [
        "pull",
        &job,
        "--bitmap",
        "monday",
        "--parent",
        "tuesday",
        "--point",
        "wednesday",
        "--dry-run",
    ];
    let said = succeed_without_change(&folder, &pull);
    assert_eq!(
        said,
        format!(
            "disk vda: wednesday would be an increment of tuesday: 1048576 of 16777216 bytes have changed; in {store}\n"
        )
    );
    let (_, value) = json_of(&[&pull[..], &["--json"]].concat());
    let disk = &value["disks"][0];
    assert_eq!(
        (&disk["state"], &disk["changed"]),
        (&"planned".into(), &(1 << 20).into()),
        "{value}"
    );
    // A store that does not exist is not made.
    let moved = fs::read_to_string(&job).unwrap().replace(&store, &machine.file("new-store"));
    fs::write(&job, moved).unwrap();
    let said = succeed_without_change(&folder, &["pull", &job, "--dry-run"]);
    assert!(said.contains("would be a full backup of 16777216 bytes, 16777216 of data"), "{said}");
    // What would be refused is refused.
    let refused = blockhaul(&["pull", &job, "--dry-run", "--point", "a\nb"]);
    assert_eq!(refused.status.code(), Some(2));
    let target = machine.file("restored");
    let said = succeed_without_change(
        &folder,
        &["restore", &store, &target, "--point", "monday", "--dry-run"],
    );
    assert!(said.ends_with(&format!("would create {target}\nnothing was changed\n")), "{said}");
    let said = succeed_without_change(&folder, &["chain", "merge", &store, "--dry-run"]);
    assert!(said.contains("monday  would be merged into tuesday"), "{said}");
    // What the increment holds is written, not what the full backup holds.
    assert!(
        said.contains(" 1048576 bytes of files removed, 1048576 bytes written by merging"),
        "{said}"
    );
    succeed_without_change(&folder, &["chain", "prune", &store, "--dry-run", "--keep-last", "1"]);
    // A point that is being read is refused as it is by the run.
    let socket = machine.scratch().socket("reader");
    let point = format!("backup:{store}?point=monday");
    let _reader = PeerServer::blockhaul(OURS.as_ref(), &socket, &["-r", &point]).unwrap();
    for args in [&["chain", "merge", &store][..], &["chain", "prune", &store, "--keep-last", "1"]] {
        for dry_run in [&["--dry-run"][..], &[]] {
            let refused = blockhaul(&[args, dry_run].concat());
            assert_eq!(refused.status.code(), Some(3), "{args:?}");
            assert!(text(&refused.stderr).contains("is being read"), "{}", text(&refused.stderr));
        }
    }
}

const CREATE: &str = "create its directory first";
const SKIP: &[&str] = &["--on-error", "skip", "--error-map", "/nosuch/map"];

#[test]
fn dry_runs_of_copies_say_what_would_be_done_and_change_nothing() {
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.path().to_path_buf();
    let file = |name: &str| scratch.file(name).display().to_string();
    let (disk, new, old) = (file("disk"), file("new"), file("old"));
    succeed(&["create", &disk, "8M"]);
    succeed(&["copy", "--range", "1M:1M", "pattern:8M", &disk]);
    fs::write(&old, vec![7; 9 << 20]).unwrap();
    let said = succeed_without_change(
        &folder,
        &["copy", &disk, &new, "--dry-run", "--journal", &file("j"), "--verify"],
    );
    for line in [
        format!(
            "would read 1048576 bytes (1 MiB) of data from {disk}; 7340032 bytes (7 MiB) more are zeroes"
        ),
        format!("would create {new}"),
        format!("would write the journal {}", file("j")),
        "would read both sides again and compare them".to_string(),
        "nothing was changed".to_string(),
    ] {
        assert!(said.lines().any(|each| each == line), "{line}: {said}");
    }
    let plan =
        ["copy", &disk, &old, "--range", "1M:2M", "--manifest", &file("m"), "--dry-run", "--json"];
    let value: Value = serde_json::from_str(&succeed_without_change(&folder, &plan)).unwrap();
    for (member, wanted) in [
        ("dry_run", json!(true)),
        ("selected", json!(2 << 20)),
        ("data", json!(1 << 20)),
        ("target_change", json!("kept")),
        ("target_size", json!(9 << 20)),
        ("manifest", json!(file("m"))),
    ] {
        assert_eq!(value[member], wanted, "{member}: {value}");
    }
    let job = file("job.toml");
    let one = |name: &str, target: &str| {
        format!("[[disk]]\nname = '{name}'\nsource = '{disk}'\ntarget = '{target}'\n")
    };
    fs::write(&job, one("a", &new) + &one("b", &old)).unwrap();
    let said = succeed_without_change(&folder, &["copy", "--job", &job, "--dry-run"]);
    assert!(
        said.contains(&format!(
            "disk b: would overwrite 9437184 bytes (9 MiB) in {old}, which then has 8388608 bytes (8 MiB)\n"
        )),
        "{said}"
    );
    let (_, value) = json_of(&["copy", &disk, &old, "--dry-run", "--json"]);
    assert_eq!(
        (&value["target_size"], &value["target_new_size"]),
        (&json!(9 << 20), &json!(8 << 20))
    );
    // A file that is no image yet goes, too.
    let image = format!("qcow2:{old}");
    let said = succeed_without_change(&folder, &["copy", &disk, &image, "--dry-run"]);
    assert!(said.contains("would overwrite 9437184 bytes (9 MiB)"), "{said}");
    let qcow2 = format!("qcow2:{}", file("image"));
    succeed(&["create", &qcow2, "16M"]);
    let said = succeed_without_change(&folder, &["copy", &disk, &qcow2, "--dry-run"]);
    let replaced = "would replace the image (a disk of 16777216 bytes (16 MiB)) in";
    assert!(said.contains(replaced) && said.contains("then has 8388608 bytes"), "{said}");
    // The target takes the size of the source.
    let said = succeed_without_change(&folder, &["copy", &disk, "null:", "--dry-run"]);
    assert!(said.contains("would write to null:"), "{said}");
    let (_, value) = json_of(&["copy", "--job", &job, "--dry-run", "--json"]);
    assert_eq!(value["disks"][0]["target_change"], "created", "{value}");
    // What would be refused is refused, and says why.
    let (in_use, folder_name) = (file("in-use"), folder.display().to_string());
    fs::write(&in_use, vec![1; 8 << 20]).unwrap();
    let serve = |socket: &str, more: &[&str]| {
        let socket = scratch.socket(socket);
        let server = PeerServer::blockhaul(OURS.as_ref(), &socket, more).unwrap();
        (server, format!("nbd+unix:///?socket={}", socket.display()))
    };
    let (_writes, export) = serve("w", &[&in_use]);
    let (_reads, readonly) = serve("r", &["--read-only", &old]);
    for (args, status, said) in [
        (vec!["copy", &disk, "/nosuch/x", "--dry-run"], 3, "create its directory first"),
        (vec!["copy", "/nosuch", &new, "--dry-run"], 3, "no such file"),
        (vec!["copy", &disk, &new, "--journal", "/nosuch/j", "--dry-run"], 1, CREATE),
        (vec!["copy", &disk, &new, "--journal", "/nosuch/j"], 1, CREATE),
        (vec!["copy", &disk, &new, "--manifest", "/nosuch/m", "--dry-run"], 1, CREATE),
        (vec!["copy", &disk, &new, "--manifest", "/nosuch/m"], 1, CREATE),
        ([&["copy", &disk, &new, "--dry-run"], SKIP].concat(), 3, CREATE),
        ([&["copy", &disk, &new], SKIP].concat(), 3, CREATE),
        (vec!["copy", &disk, &disk, "--dry-run"], 2, "the same"),
        (vec!["copy", &old, "memory:8M", "--dry-run"], 3, "is smaller than the source"),
        (vec!["copy", &disk, &folder_name, "--dry-run"], 2, "is a directory"),
        (vec!["copy", &disk, &in_use, "--dry-run"], 3, "another program has locked it"),
        (vec!["copy", &disk, &readonly, "--dry-run"], 3, "the target is read-only"),
        (vec!["copy", &old, &export, "--dry-run"], 3, "is smaller than the source"),
        (vec!["copy", &disk, &new, "--json"], 2, "--dry-run"),
    ] {
        let before = files(&folder);
        let output = blockhaul(&args);
        let words = text(&output.stderr).to_lowercase();
        assert_eq!(output.status.code(), Some(status), "{args:?}: {words}");
        assert!(words.contains(said), "{args:?}: {words}");
        assert!(files(&folder) == before, "{args:?}");
    }
}
