//! A path is used in the same way by each command: an image in it is noticed, `--format` and `--partition` choose the
//! disk, and `info` says what the file is.

use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, text};
use serde_json::{Value, json};

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const LIMIT: Duration = Duration::from_secs(60);

struct Folder(ScratchDir);

impl Folder {
    /// A directory with `disk.raw`.
    fn new() -> Folder {
        let folder = Folder(ScratchDir::new().unwrap());
        folder.ours(&["copy", "sample:3M", "disk.raw"]);
        folder
    }

    fn run(&self, program: &str, args: &[&str]) -> Output {
        let mut command = Command::new(program);
        tools::output(command.args(args).current_dir(self.0.path()), LIMIT).unwrap()
    }

    fn shell(&self, script: &str) -> String {
        let output = self.run("sh", &["-ec", script]);
        assert!(output.status.success(), "{script}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs lines of the documentation.
    fn recipe(&self, lines: &str) {
        self.shell(&format!("blockhaul() {{ {OURS} \"$@\"; }}\n{lines}"));
    }

    /// Standard output of our program, which succeeds and warns of nothing.
    fn ours(&self, args: &[&str]) -> String {
        let output = self.run(OURS, args);
        let said = text(&output.stderr);
        assert!(output.status.success() && !said.contains("warning"), "{args:?}: {said}");
        text(&output.stdout)
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ours(args)).unwrap()
    }

    /// Exit status and standard error of our program.
    fn said(&self, args: &[&str]) -> (Option<i32>, String) {
        let output = self.run(OURS, args);
        (output.status.code(), text(&output.stderr))
    }
}

#[test]
fn every_command_that_reads_notices_an_image() {
    let folder = Folder::new();
    folder.ours(&["copy", "disk.raw", "qcow2:vm.qcow2"]);
    folder.ours(&["copy", "--manifest", "m", "disk.raw", "other.raw"]);
    folder.shell(
        "gzip -k disk.raw; tar cf some.tar disk.raw; : > vm.ovf; tar cf vm.ova vm.ovf disk.raw",
    );
    let files = [
        ("vm.qcow2", "a qcow2 image", "the disk in it: qcow2:vm.qcow2;"),
        ("disk.raw.gz", "a gzip file", "[ blockhaul serve -r --layer 'gz' disk.raw.gz ];"),
        ("some.tar", "a tar archive", "--layer 'tar?tar-entry=NAME' some.tar ];"),
        ("vm.ova", "an OVA", "the disk in it: ova:vm.ova;"),
    ];
    for (file, noun, hint) in files {
        let compare = ["compare", "disk.raw", file];
        let commands: [&[&str]; 5] = [
            &compare,
            &["checksum", file],
            &["map", file],
            &["measure", file],
            &["verify", file, "m"],
        ];
        for words in commands {
            let (_, said) = folder.said(words);
            let wanted = format!("warning: {file} is {noun} and its bytes are read as they are");
            assert!(said.contains(&wanted) && said.contains(hint), "{words:?}: {said}");
            let words: Vec<_> = words
                .iter()
                .map(|word| if *word == file { format!("file:{file}") } else { word.to_string() })
                .collect();
            let words: Vec<_> = words.iter().map(String::as_str).collect();
            assert!(!folder.said(&words).1.contains("warning"), "{words:?}");
        }
    }
    // The server of the hint shows the disk.
    let packed = ["[", "blockhaul", "serve", "-r", "--layer", "gz", "disk.raw.gz", "]"];
    folder.ours(&[&["compare", "disk.raw"], &packed[..]].concat());
    // Two of one kind are compared as they are on purpose.
    folder.shell("cp vm.qcow2 copy.qcow2");
    folder.ours(&["compare", "vm.qcow2", "copy.qcow2"]);
}

#[test]
fn the_format_of_a_path_can_be_chosen_in_every_command_that_reads() {
    let folder = Folder::new();
    folder.ours(&["copy", "disk.raw", "qcow2:vm.qcow2"]);
    folder.ours(&["copy", "--manifest", "m", "disk.raw", "other.raw"]);
    let digest = folder.ours(&["checksum", "disk.raw"]);
    let digest = digest.split(' ').next().unwrap();
    for format in ["auto", "qcow2"] {
        let found = folder.ours(&["checksum", "--format", format, "vm.qcow2"]);
        assert!(found.starts_with(digest), "{found}");
        folder.ours(&["verify", "--format", format, "vm.qcow2", "m"]);
        let [image, raw] = ["vm.qcow2", "disk.raw"]
            .map(|name| folder.ours(&["measure", "--format", "auto", name]));
        assert_eq!(image, raw);
        let map = folder.json(&["map", "--json", "--image-format", format, "vm.qcow2"]);
        let last = map.as_array().unwrap().last().unwrap();
        assert_eq!(last["offset"].as_u64().unwrap() + last["length"].as_u64().unwrap(), 3 << 20);
    }
    let found = folder.ours(&["compare", "--format", "auto", "disk.raw", "vm.qcow2"]);
    assert_eq!(found, "identical: 3145728 bytes\n");
    let (status, said) = folder.said(&["checksum", "--format", "auto", "memory:1M"]);
    assert!(status == Some(2) && said.contains("memory:1M is not a path"), "{said}");
}

#[test]
fn info_begins_with_the_format_and_the_sizes_of_a_file() {
    let folder = Folder::new();
    folder.ours(&["copy", "disk.raw", "qcow2:vm.qcow2?cluster=4k"]);
    folder.ours(&["create", "qcow2:over.qcow2?backing=qcow2:vm.qcow2", "4M"]);
    let len = |name: &str| std::fs::metadata(folder.0.file(name)).unwrap().len();
    for (name, size) in [("vm.qcow2", 3 << 20), ("over.qcow2", 4 << 20)] {
        let found = folder.ours(&["info", name]);
        let lines: Vec<_> = found.lines().take(5).collect();
        assert_eq!(lines[..2], [&format!("device: {name}"), "\tformat: qcow2"]);
        assert!(lines[2].starts_with(&format!("\tdisk-size: {size} (")), "{found}");
        assert!(lines[3].starts_with(&format!("\tfile-size: {}", len(name))), "{found}");
        assert!(lines[4].ends_with(&format!("for the disk in it: qcow2:{name}")), "{found}");
        assert!(!found.contains("content:"), "the kind of the file's bytes misleads: {found}");
        let found = folder.json(&["info", "--json", name]);
        let hint = format!("qcow2:{name}");
        assert_eq!(
            (&found["format"], &found["disk-size"], &found["hint"]),
            (&json!("qcow2"), &json!(size), &json!(hint))
        );
        assert_eq!(found["file-size"], len(name));
    }
    let found = folder.json(&["info", "--json", "disk.raw"]);
    assert_eq!((&found["format"], &found["hint"]), (&json!("raw"), &Value::Null));
    assert_eq!((&found["disk-size"], &found["file-size"]), (&json!(3 << 20), &json!(3 << 20)));
}

#[test]
fn commands_about_images_name_the_format_of_another_file() {
    let folder = Folder::new();
    folder.shell("printf vhdxfile > vm.vhdx; : > empty");
    for (file, found) in
        [("disk.raw", "a raw disk"), ("vm.vhdx", "a VHDX image"), ("empty", "a raw disk")]
    {
        let commands: [(&[&str], i32); 5] = [
            (&["check", file], 1),
            (&["snapshot", "list", file], 2),
            (&["bitmap", "list", file], 2),
            (&["commit", file], 2),
            (&["info", "--chain", file], 1),
        ];
        for (words, expected) in commands {
            let (status, said) = folder.said(words);
            assert_eq!(status, Some(expected), "{words:?}: {said}");
            let wanted = format!("{file} is {found}, not a qcow2 image");
            assert!(said.contains(&wanted) && !said.contains("file:PATH"), "{words:?}: {said}");
        }
    }
}

/// The partitions that `info` lists: number, offset, size, type and name.
fn listed(info: &Value) -> Vec<Value> {
    let all = info["exports"][0]["partitions"].as_array().unwrap().iter();
    all.map(|one| json!([one["number"], one["offset"], one["size"], one["type"], one["name"]]))
        .collect()
}

#[test]
fn partitions_are_listed_as_sfdisk_lists_them() {
    let Some(sfdisk) = PeerProgram::require("sfdisk") else { return };
    let folder = Folder::new();
    let tables = [
        (
            512,
            "gpt",
            "start=2048,size=4096,name=boot,type=uefi\\nstart=8192,size=2048,name=\"two words\"\\n",
        ),
        (4096, "gpt", "start=256,size=512,name=boot\\nstart=1024,size=512\\n"),
        (
            512,
            "dos",
            "start=64,size=100,type=83\\nstart=1000,size=5000,type=5\\nstart=1064,size=50\\nstart=1200,size=70,type=82\\n",
        ),
    ];
    for (sector, label, lines) in tables {
        std::fs::File::create(folder.0.file("parts")).unwrap().set_len(32 << 20).unwrap();
        let tool = sfdisk.program().to_str().unwrap();
        let sectors = if sector == 512 { "" } else { "--sector-size 4096" };
        folder.shell(&format!("printf 'label: {label}\\n{lines}' | {tool} -q {sectors} parts"));
        let found = folder.json(&["info", "--json", "parts"]);
        let table = &found["exports"][0];
        let name = if label == "dos" { "mbr" } else { "gpt" };
        assert_eq!(
            (&table["partition-table"], &table["sector-size"]),
            (&json!(name), &json!(sector))
        );
        let theirs = folder.shell(&format!("{tool} {sectors} --json parts"));
        let theirs: Value = serde_json::from_str(&theirs).unwrap();
        let theirs = theirs["partitiontable"]["partitions"].as_array().unwrap().iter().map(|one| {
            let node = one["node"].as_str().unwrap();
            let number: u64 =
                node.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
            let bytes = |name: &str| one[name].as_u64().unwrap() * sector;
            let kind = one["type"].as_str().unwrap().to_lowercase();
            let kind = if label == "dos" { format!("0x{kind:0>2}") } else { kind };
            let name = one["name"].as_str().unwrap_or_default();
            json!([number, bytes("start"), bytes("size"), kind, name])
        });
        assert_eq!(listed(&found), theirs.collect::<Vec<_>>());
    }
    let found = folder.ours(&["info", "parts"]);
    assert!(found.contains("\tpartitions: mbr, sectors of 512 bytes\n"), "{found}");
    assert!(found.contains("\t\t6: offset 614400, size 35840 (35K), type Linux swap\n"), "{found}");
}

#[test]
fn every_command_can_use_one_partition() {
    let folder = Folder::new();
    folder.ours(&["copy", "--allocated", "pattern:1M", "first.raw"]);
    folder.ours(&["copy", "partitioning:first.raw,disk.raw", "whole.raw"]);
    folder.ours(&["copy", "--verify", "--partition", "2", "whole.raw", "second.raw"]);
    folder.shell("cmp second.raw disk.raw");
    folder.ours(&["compare", "--partition", "2", "whole.raw", "disk.raw"]);
    let [part, whole] =
        [&["checksum", "--partition", "2", "whole.raw"][..], &["checksum", "disk.raw"]]
            .map(|words| folder.ours(words));
    assert_eq!(part.split(' ').next(), whole.split(' ').next());
    folder.ours(&["copy", "--manifest", "m", "disk.raw", "other.raw"]);
    folder.ours(&["verify", "--partition", "2", "whole.raw", "m"]);
    assert_eq!(folder.ours(&["info", "--size", "--partition", "1", "whole.raw"]), "1048576\n");
    let map = folder.json(&["map", "--json", "--partition", "1", "whole.raw"]);
    assert_eq!(map.as_array().unwrap().last().unwrap()["length"], 1 << 20);
    let served = ["serve", "--partition", "2", "whole.raw", "--run"];
    let script = format!("{OURS} info --size \"$uri\"");
    assert_eq!(folder.ours(&[&served[..], &[script.as_str()]].concat()), "3145728\n");
    std::fs::write(
        folder.0.file("job.toml"),
        "[[disk]]\nsource = 'whole.raw'\npartition = 1\ntarget = 'job.raw'\n",
    )
    .unwrap();
    folder.ours(&["copy", "--job", "job.toml"]);
    folder.shell("cmp job.raw first.raw");
    for words in [
        &["copy", "--partition", "9", "whole.raw", "x"][..],
        &["map", "--partition", "9", "whole.raw"],
    ] {
        let (_, said) = folder.said(words);
        assert!(said.contains("no partition 9: the disk has 1 and 2"), "{said}");
    }
    assert!(!folder.0.file("x").exists());
}

#[test]
fn two_partitions_of_a_disk_are_served_at_once() {
    let folder = Folder::new();
    folder.ours(&["copy", "partitioning:disk.raw,disk.raw", "whole.raw"]);
    let words = |first: &[&str]| {
        let own = |number| ["whole.raw", "--partition", number, "]"];
        let [one, two] = [own("1"), own("2")];
        let script = format!("{OURS} info --size \"$uri\"");
        let export = ["serve", "--export", "a=["];
        let other = ["--export", "b=["];
        let all: Vec<_> = [&export[..], &one, &other, &two, first, &["--run", &script]].concat();
        folder.run(OURS, &all)
    };
    let output = words(&["-r"]);
    assert_eq!(text(&output.stdout), "3145728\n", "{}", text(&output.stderr));
    // Both would write to the disk.
    let output = words(&[]);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("make one export read-only"), "{said}");
}

/// The OVF description of a virtual machine with these files, whose attributes follow the names.
fn description(files: &[(&str, &str)]) -> String {
    let mut text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ovf:Envelope \
                    xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\"><ovf:References>"
        .to_string();
    for (file, attributes) in files {
        text += &format!("<ovf:File ovf:id=\"{file}\" ovf:href=\"{file}\" {attributes}/>");
    }
    text += "</ovf:References><ovf:DiskSection>";
    for (file, _) in files {
        text += &format!(
            "<ovf:Disk ovf:diskId=\"d-{file}\" ovf:fileRef=\"{file}\" ovf:capacity=\"3\" \
             ovf:capacityAllocationUnits=\"byte * 2^20\"/>"
        );
    }
    text + "</ovf:DiskSection></ovf:Envelope>"
}

#[test]
fn disks_of_an_ova_are_read_however_it_was_packed() {
    let Some(img) = PeerProgram::require("qemu-img") else { return };
    let folder = Folder::new();
    let tool = img.program().to_str().unwrap();
    folder.ours(&["copy", "pattern:3M", "other.raw"]);
    for (raw, vmdk) in [("disk.raw", "vm-disk1.vmdk"), ("other.raw", "vm-disk2.vmdk")] {
        folder.shell(&format!("{tool} convert -O vmdk -o subformat=streamOptimized {raw} {vmdk}"));
    }
    let write = |files: &[(&str, &str)]| {
        std::fs::write(folder.0.file("vm.ovf"), description(files)).unwrap()
    };
    write(&[("vm-disk1.vmdk", "")]);
    folder.shell("printf x > ._vm.ovf; cp ._vm.ovf ._vm-disk1.vmdk; touch vm.mf");
    let order = "._vm.ovf vm.ovf vm.mf ._vm-disk1.vmdk vm-disk1.vmdk";
    for format in ["ustar", "gnu", "pax"] {
        folder.shell(&format!("tar cf vm.ova --format {format} {order}"));
        folder.ours(&["compare", "ova:vm.ova", "disk.raw"]);
        folder.shell(&format!("tar cf vm.ova --format {format} --transform 's,^,./,' {order}"));
        folder.ours(&["compare", "ova:vm.ova?disk=1", "disk.raw"]);
    }
    folder.ours(&["compare", "--format", "auto", "vm.ova", "disk.raw"]);
    // A manifest with the right digests, and with others.
    for (tool, kind) in [("sha1sum", "SHA1"), ("sha256sum", "SHA256"), ("sha512sum", "SHA512")] {
        let line = format!("{tool} \"$f\" | sed \"s/ .*//; s/^/{kind}($f)= /\"");
        folder.shell(&format!(
            "for f in vm.ovf vm-disk1.vmdk; do {line}; done > vm.mf; tar cf vm.ova {order}"
        ));
        folder.ours(&["compare", "ova:vm.ova", "disk.raw"]);
        for (file, damaged) in [("vm-disk1.vmdk", "disk1.vmdk)"), ("vm.ovf", "vm.ovf)")] {
            folder.shell(&format!(
                "sed -i 's/{damaged}= .*/{damaged}= 12ab/' vm.mf; tar cf vm.ova {order}"
            ));
            let (status, said) = folder.said(&["copy", "ova:vm.ova", "damaged.raw"]);
            let why = format!("{file:?} has another {kind} than the manifest \"vm.mf\" says");
            assert!(
                status == Some(3) && said.contains(&why) && said.contains("manifest=ignore"),
                "{status:?} {said}"
            );
            folder.ours(&["compare", "ova:vm.ova?manifest=ignore", "disk.raw"]);
        }
        assert!(!folder.0.file("damaged.raw").exists());
    }
    folder.ours(&["copy", "ova:vm.ova?disk=all&manifest=ignore", "whole{}.raw"]);
    folder.ours(&["compare", "whole1.raw", "disk.raw"]);
    // A packed member.
    folder.shell("gzip -k vm-disk1.vmdk");
    write(&[("vm-disk1.vmdk.gz", "ovf:compression=\"gzip\"")]);
    folder.shell("tar cf vm.ova vm.ovf vm-disk1.vmdk.gz");
    folder.ours(&["compare", "ova:vm.ova", "disk.raw"]);
    // Several disks.
    write(&[("vm-disk1.vmdk", ""), ("vm-disk2.vmdk", "")]);
    folder.shell("tar cf vm.ova vm.ovf vm-disk1.vmdk vm-disk2.vmdk");
    folder.ours(&["compare", "ova:vm.ova?disk=2", "other.raw"]);
    folder.ours(&["copy", "ova:vm.ova?disk=all", "out{}.raw"]);
    folder.ours(&["compare", "out1.raw", "disk.raw"]);
    folder.ours(&["compare", "out2.raw", "other.raw"]);
    folder.ours(&["copy", "--manifest", "m{}", "ova:vm.ova?disk=all", "out{}.raw"]);
    folder.ours(&["verify", "out2.raw", "m2"]);
    let job = "[[disk]]\nsource = 'ova:vm.ova?disk=all'\ntarget = 'qcow2:job{}.qcow2'\n";
    std::fs::write(folder.0.file("vm.toml"), job).unwrap();
    folder.ours(&["copy", "--job", "vm.toml"]);
    folder.ours(&["compare", "qcow2:job2.qcow2", "other.raw"]);
    for (words, why) in [
        (["copy", "ova:vm.ova?disk=all", "x"], "has 2 disks: write {} in the target x"),
        (["compare", "ova:vm.ova?disk=all", "disk.raw"], "disk=all is for blockhaul copy"),
    ] {
        let (_, said) = folder.said(&words);
        assert!(said.contains(why), "{said}");
    }
    let page = include_str!("../../../../../docs/recipes.md");
    let recipe = page.split("## A disk in an OVA\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let blocks: Vec<_> = recipe.split("```\n").skip(1).step_by(2).collect();
    assert_eq!(blocks.len(), 2, "of one disk, and of several");
    folder.recipe(blocks[1]);
    folder.ours(&["compare", "data.raw", "qcow2:vm-2.qcow2"]);
    write(&[("vm-disk1.vmdk", "")]);
    folder.shell("mv vm.ova both.ova; tar cf vm.ova vm.ovf vm-disk1.vmdk");
    folder.recipe(blocks[0]);
    folder.shell("mv both.ova vm.ova");
    let both = "1 (vm-disk1.vmdk, 3M), 2 (vm-disk2.vmdk, 3M)";
    for (device, why) in
        [("ova:vm.ova", "it has 2 disks: choose one"), ("ova:vm.ova?disk=3", "there is no disk 3")]
    {
        let (_, said) = folder.said(&["copy", device, "x"]);
        assert!(said.contains(why) && said.contains(both), "{said}");
    }
    for (device, facts) in [("ova:vm.ova", false), ("vm.ova", true)] {
        let listed = folder.ours(&["info", device]);
        for line in ["disks: 2", "1: vm-disk1.vmdk, format VMDK, disk-size 3145728 (3M), file-size"]
        {
            assert!(listed.contains(line), "{listed}");
        }
        assert!(listed.contains(": ova:vm.ova?disk=1\n"), "{listed}");
        assert_eq!(listed.contains("export-size"), facts, "{listed}");
    }
    assert!(folder.ours(&["info", "ova:vm.ova?disk=2"]).starts_with("device: ova:vm.ova?disk=2\n"));
    let (status, said) = folder.said(&["info", "--size", "ova:vm.ova"]);
    assert!(status == Some(1) && said.contains("it has 2 disks"), "{said}");
}

#[test]
fn an_ova_that_cannot_be_read_is_refused() {
    let folder = Folder::new();
    let refused = |files: &[(&str, &str)], members: &str, why: &str| {
        std::fs::write(folder.0.file("vm.ovf"), description(files)).unwrap();
        folder.shell(&format!("tar cf vm.ova {members}"));
        let (_, said) = folder.said(&["copy", "ova:vm.ova", "x"]);
        assert!(said.contains(why), "{said}");
        assert!(!folder.0.file("x").exists());
    };
    refused(&[], "disk.raw", "it has no OVF description");
    refused(&[], "vm.ovf disk.raw", "it has no disk with data");
    refused(
        &[("gone.vmdk", "")],
        "vm.ovf disk.raw",
        "\"gone.vmdk\" of disk 1 is not in the archive",
    );
    refused(&[("disk.raw", "ovf:chunkSize=\"9\"")], "vm.ovf disk.raw", "is in chunks");
    refused(&[("disk.raw", "ovf:compression=\"xz\"")], "vm.ovf disk.raw", "compression \"xz\"");
    refused(&[("a & b", "")], "vm.ovf disk.raw", "no XML");
    for (made, why) in [
        (
            "tar c vm.ovf disk.raw | head -c 1M > vm.ova",
            "cannot open the source: ova:vm.ova: the archive ends within the file \"disk.raw\" of disk 1; \
             get the OVA again",
        ),
        ("tar czf vm.ova vm.ovf disk.raw", "packed with gzip; unpack it first: gunzip"),
        (
            "cp vm.ovf vm.ova",
            "an OVF description, and not an archive with it; give the file of the disk",
        ),
    ] {
        std::fs::write(folder.0.file("vm.ovf"), description(&[("disk.raw", "")])).unwrap();
        folder.shell(made);
        let (status, said) = folder.said(&["copy", "ova:vm.ova", "x"]);
        assert!(status == Some(3) && said.contains(why), "{status:?} {said}");
        let (status, listed) = folder.said(&["info", "ova:vm.ova"]);
        assert!(status == Some(1) && listed.contains("cannot open the device"), "{listed}");
    }
    // A raw disk is one, too; a target it is not.
    std::fs::write(folder.0.file("vm.ovf"), description(&[("disk.raw", "")])).unwrap();
    folder.shell("tar cf vm.ova vm.ovf disk.raw");
    folder.ours(&["compare", "ova:vm.ova", "disk.raw"]);
    let (_, said) = folder.said(&["copy", "disk.raw", "ova:vm.ova"]);
    assert!(said.contains("an OVA is read-only"), "{said}");
}

#[test]
fn an_image_in_an_ova_opens_no_other_file() {
    let folder = Folder::new();
    let image = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\
                 RW 6144 FLAT \"disk.raw\" 0\n";
    std::fs::write(folder.0.file("d.vmdk"), image).unwrap();
    std::fs::write(folder.0.file("vm.ovf"), description(&[("d.vmdk", "")])).unwrap();
    folder.shell("tar cf vm.ova vm.ovf d.vmdk");
    let (status, said) = folder.said(&["checksum", "ova:vm.ova"]);
    assert!(status != Some(0) && said.contains("disk.raw"), "{said}");
}

#[test]
fn errors_about_images_and_contexts_lead_to_what_there_is() {
    let folder = Folder::new();
    folder.ours(&["create", "qcow2:vm.qcow2", "1M"]);
    folder.ours(&["bitmap", "add", "vm.qcow2", "b1"]);
    let served = format!("{OURS} map --context qemu:foo \"$uri\"");
    let cases: [(&[&str], &str); 6] = [
        (&["bitmap", "remove", "vm.qcow2", "b2"], "the image has no bitmap \"b2\": it has \"b1\""),
        (&["map", "--context", "foo", "disk.raw"], "context \"foo\"; it has base:allocation"),
        (&["serve", "disk.raw", "--run", &served], "context \"qemu:foo\"; it has base:allocation"),
        (&["copy", "--target-layer", "gz", "disk.raw", "x"], "copy SOURCE - | gzip > FILE"),
        (&["copy", "disk.raw", "as-qcow2:x"], "for a new image write qcow2:FILE"),
        (&["check", "disk.raw"], "disk.raw is a raw disk, not a qcow2 image"),
    ];
    for (words, wanted) in cases {
        let (status, said) = folder.said(words);
        assert!(status != Some(0) && said.contains(wanted), "{words:?}: {said}");
    }
    assert!(!folder.0.file("x").exists());
}

#[test]
fn a_closed_standard_output_is_refused_by_commands_that_only_print() {
    let folder = Folder::new();
    for command in ["checksum", "map"] {
        let output = folder.run("sh", &["-c", &format!("{OURS} {command} disk.raw >&-")]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("standard output") && said.contains("is closed"), "{said}");
    }
    folder.shell(&format!("{OURS} map --svg map.svg disk.raw >&-; test -s map.svg"));
    folder.shell(&format!("{OURS} checksum disk.raw >/dev/null"));
}
