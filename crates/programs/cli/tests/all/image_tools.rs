//! `create`, `measure`, `snapshot`, `bitmap` and `info --chain`, next to qemu-img.

use std::process::Command;
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, text};
use serde_json::Value;

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const LIMIT: Duration = Duration::from_secs(60);

struct Tools {
    img: PeerProgram,
    scratch: ScratchDir,
}

impl Tools {
    fn find() -> Option<Tools> {
        Some(Tools { img: PeerProgram::require("qemu-img")?, scratch: ScratchDir::new().unwrap() })
    }

    fn img(&self, args: &[&str]) -> String {
        let output = self.output(self.img.command(), args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn output(&self, mut command: Command, args: &[&str]) -> std::process::Output {
        tools::output(command.args(args).current_dir(self.scratch.path()), LIMIT).unwrap()
    }

    /// What our program prints, or its error.
    fn ours(&self, args: &[&str]) -> Result<String, String> {
        let output = self.output(Command::new(OURS), args);
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ours(args).unwrap()).unwrap()
    }
}

#[test]
fn images_that_were_created_are_in_order() {
    let Some(tools) = Tools::find() else { return };
    tools.ours(&["create", "qcow2:new.qcow2?cluster=128k", "10G"]).unwrap();
    tools.img(&["check", "new.qcow2"]);
    let info: Value =
        serde_json::from_str(&tools.img(&["info", "--output=json", "new.qcow2"])).unwrap();
    assert_eq!(
        (&info["virtual-size"], &info["cluster-size"]),
        (&(10_u64 << 30).into(), &(128 << 10).into())
    );
    tools.ours(&["create", "new.raw", "3M"]).unwrap();
    assert_eq!(std::fs::metadata(tools.scratch.file("new.raw")).unwrap().len(), 3 << 20);
    // A file with content stays.
    let before = std::fs::read(tools.scratch.file("new.qcow2")).unwrap();
    let said = tools.ours(&["create", "qcow2:new.qcow2", "1M"]).unwrap_err();
    assert!(said.contains("not empty") && said.contains("--overwrite"), "{said}");
    assert_eq!(std::fs::read(tools.scratch.file("new.qcow2")).unwrap(), before);
    tools.ours(&["create", "--overwrite", "qcow2:new.qcow2", "1M"]).unwrap();
    tools.img(&["check", "new.qcow2"]);
    tools.ours(&["create", "qcow2:over.qcow2?backing=qcow2:new.qcow2", "2M"]).unwrap();
    tools.img(&["check", "over.qcow2"]);
}

#[test]
fn images_are_measured_as_qemu_img_does() {
    let Some(tools) = Tools::find() else { return };
    let mut disk = vec![0; (20 << 20) + 512];
    for at in [0, 65 << 10, 5 << 20, (20 << 20) + 100] {
        disk[at..at + 400].fill(1);
    }
    std::fs::write(tools.scratch.file("bytes"), &disk).unwrap();
    tools.img(&["convert", "-f", "raw", "-O", "raw", "-S", "4k", "bytes", "disk"]);
    std::fs::File::create(tools.scratch.file("large")).unwrap().set_len(3 << 40).unwrap();
    for name in ["disk", "large"] {
        for cluster in ["64k", "4k", "2M"] {
            let option = format!("cluster_size={cluster}");
            if name == "large" && cluster == "4k" {
                continue;
            }
            let wanted = tools.img(&[
                "measure",
                "-f",
                "raw",
                "-O",
                "qcow2",
                "-o",
                &option,
                "--output=json",
                name,
            ]);
            let wanted: Value = serde_json::from_str(&wanted).unwrap();
            let found = tools.json(&["measure", "--json", "--cluster", cluster, name]);
            for field in ["required", "fully-allocated"] {
                assert_eq!(found[field], wanted[field], "{name} {cluster} {field}");
            }
        }
    }
    let raw = tools.json(&["measure", "--json", "--target", "raw", "disk"]);
    assert_eq!(raw["required"], disk.len());
    assert!(tools.ours(&["measure", "--cluster", "3k", "disk"]).is_err());
    let text = tools.ours(&["measure", "disk"]).unwrap();
    assert!(
        text.starts_with("required size: ") && text.contains("fully allocated size: "),
        "{text}"
    );
}

#[test]
fn snapshots_bitmaps_and_chains_are_described() {
    let Some(tools) = Tools::find() else { return };
    std::fs::write(tools.scratch.file("base.raw"), vec![1; 1 << 20]).unwrap();
    let create = |args: &[&str]| tools.img(&[&["create", "-q", "-f", "qcow2"], args].concat());
    create(&["-b", "base.raw", "-F", "raw", "middle.qcow2"]);
    create(&[
        "-o",
        "compression_type=zstd,extended_l2=on",
        "-b",
        "middle.qcow2",
        "-F",
        "qcow2",
        "top.qcow2",
        "2M",
    ]);
    tools.img(&["bitmap", "--add", "-g", "128k", "top.qcow2", "daily"]);
    tools.img(&["bitmap", "--add", "top.qcow2", "off"]);
    tools.img(&["bitmap", "--disable", "top.qcow2", "off"]);
    tools.img(&["snapshot", "-c", "before the upgrade", "top.qcow2"]);
    let bitmaps = tools.ours(&["bitmap", "list", "top.qcow2"]).unwrap();
    assert_eq!(bitmaps, "enabled\t131072\tdaily\ndisabled\t65536\toff\n");
    let bitmaps = tools.json(&["bitmap", "list", "--json", "qcow2:top.qcow2"]);
    assert_eq!(bitmaps["bitmaps"][0]["name"], "daily");
    let snapshots = tools.ours(&["snapshot", "list", "top.qcow2"]).unwrap();
    assert_eq!(snapshots, "1\t2097152\tbefore the upgrade\n");
    let json = tools.json(&["snapshot", "list", "--json", "top.qcow2"]);
    assert_eq!(json["snapshots"][0]["id"], "1");
    // Names are not followed, unless that is allowed.
    let said = tools.ours(&["info", "--chain", "top.qcow2"]).unwrap_err();
    assert!(said.contains("which is not opened"), "{said}");
    let chain = tools.json(&["info", "--chain", "--backing", "allow", "--json", "top.qcow2"]);
    let wanted = tools.img(&["info", "--backing-chain", "--output=json", "top.qcow2"]);
    let wanted: Vec<Value> = serde_json::from_str(&wanted).unwrap();
    assert_eq!(chain.as_array().unwrap().len(), 3);
    for (found, wanted) in chain.as_array().unwrap().iter().zip(&wanted) {
        assert_eq!(found["format"], wanted["format"]);
        if found["format"] == "qcow2" {
            assert_eq!(found["virtual-size"], wanted["virtual-size"]);
            assert_eq!(found["cluster-size"], wanted["cluster-size"]);
            assert_eq!(found["backing-file"], wanted["backing-filename"]);
            let data = &wanted["format-specific"]["data"];
            assert_eq!(found["compression-type"], data["compression-type"]);
            assert_eq!(found["extended-l2"], data["extended-l2"]);
            assert_eq!(found["refcount-bits"], data["refcount-bits"]);
        }
    }
    let text = tools.ours(&["info", "--chain", "--backing", "allow", "top.qcow2"]).unwrap();
    for part in
        ["compression: zstd", "bitmap: off (disabled", "snapshot: 1 before", "base.raw: raw"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    for args in [["snapshot", "list", "base.raw"], ["bitmap", "list", "missing"]] {
        assert!(tools.ours(&args).is_err());
    }
    // A loop.
    tools.img(&["rebase", "-u", "-b", "top.qcow2", "-F", "qcow2", "middle.qcow2"]);
    let said = tools.ours(&["info", "--chain", "--backing", "allow", "top.qcow2"]).unwrap_err();
    assert!(said.contains("loop"), "{said}");
}

#[test]
fn bitmaps_are_changed() {
    let Some(tools) = Tools::find() else { return };
    tools.img(&["create", "-q", "-f", "qcow2", "vm.qcow2", "4M"]);
    let done = |args: &[&str]| tools.ours(&[&["bitmap"], args].concat());
    done(&["add", "vm.qcow2", "monday"]).unwrap();
    done(&["add", "qcow2:vm.qcow2", "week", "--disabled", "--granularity", "4k"]).unwrap();
    let list = || tools.ours(&["bitmap", "list", "vm.qcow2"]).unwrap();
    assert_eq!(list(), "enabled\t65536\tmonday\ndisabled\t4096\tweek\n");
    done(&["disable", "vm.qcow2", "monday"]).unwrap();
    done(&["enable", "vm.qcow2", "week"]).unwrap();
    done(&["merge", "vm.qcow2", "week", "monday"]).unwrap();
    done(&["clear", "vm.qcow2", "monday"]).unwrap();
    assert_eq!(list(), "disabled\t65536\tmonday\nenabled\t4096\tweek\n");
    tools.img(&["check", "vm.qcow2"]);
    done(&["merge", "--from", "qcow2:vm.qcow2", "vm.qcow2", "week", "monday"]).unwrap();
    done(&["remove", "vm.qcow2", "monday"]).unwrap();
    done(&["remove", "vm.qcow2", "week"]).unwrap();
    assert_eq!(list(), "");
    for (args, wanted) in [
        (&["remove", "vm.qcow2", "week"][..], "no bitmap \"week\": it has none"),
        (&["add", "vm.qcow2", "b", "--granularity", "100"], "granularity 100"),
        (&["merge", "vm.qcow2", "week"], "SOURCE"),
        (&["add", "missing", "b"], "missing"),
    ] {
        let said = done(args).unwrap_err();
        assert!(said.contains(wanted), "{args:?}: {said}");
    }
}

#[test]
fn backing_files_are_changed() {
    let Some(tools) = Tools::find() else { return };
    std::fs::write(tools.scratch.file("base.raw"), vec![1; 1 << 20]).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw"];
    tools.img(&[&create[..], &["top.qcow2"]].concat());
    let info = || -> Value {
        serde_json::from_str(&tools.img(&["info", "--output=json", "top.qcow2"])).unwrap()
    };
    let said = tools.ours(&["commit", "top.qcow2"]).unwrap_err();
    assert!(said.contains("--backing allow"), "{said}");
    assert_eq!(
        tools.ours(&["commit", "--backing", "allow", "top.qcow2"]).unwrap(),
        "0 bytes were written to the backing file\n"
    );
    std::fs::rename(tools.scratch.file("base.raw"), tools.scratch.file("moved.raw")).unwrap();
    let said = tools.ours(&["rebase", "--unsafe", "top.qcow2", "moved.raw"]).unwrap_err();
    assert!(said.contains("--backing-format"), "{said}");
    // The name of 0.2 and the earlier one.
    for format in ["--backing-format", "--format"] {
        tools.ours(&["rebase", "--unsafe", "top.qcow2", "moved.raw", format, "raw"]).unwrap();
    }
    assert_eq!(info()["backing-filename"], "moved.raw");
    let flatten = ["rebase", "--flatten", "top.qcow2"];
    let said = tools.ours(&flatten).unwrap_err();
    assert!(said.contains("--backing allow"), "{said}");
    let flatten = ["rebase", "--backing", "allow", "--flatten", "top.qcow2"];
    assert_eq!(tools.ours(&flatten).unwrap(), "1048576 bytes were written to the image\n");
    assert_eq!(info()["backing-filename"], Value::Null);
    tools.img(&["compare", "-f", "qcow2", "-F", "raw", "top.qcow2", "moved.raw"]);
    tools.img(&["check", "top.qcow2"]);
}
