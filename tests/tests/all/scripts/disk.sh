#!/bin/sh
# A disk in $tmpdir, with every method; each call is noted in $calls. For tests.
echo "$*" >> "$calls"
case "$1" in
  thread_model) echo serialize_requests ;;
  magic_config_key) echo size ;;
  config) printf %s "$3" > "$tmpdir/$2" ;;
  get_ready) truncate -s "$(cat "$tmpdir/size")" "$tmpdir/disk" ;;
  list_exports) printf 'INTERLEAVED\na\none\nb\ntwo\n' ;;
  default_export) echo a ;;
  export_description) echo "the disk $2" ;;
  open) echo "h-$3" ;;
  get_size) stat -c %s "$tmpdir/disk" ;;
  block_size) echo 1 4K 1M ;;
  is_rotational) exit 3 ;;
  can_fua | can_cache) echo native ;;
  can_*) ;;
  pread) dd if="$tmpdir/disk" iflag=skip_bytes,count_bytes skip="$4" count="$3" bs=64K status=none ;;
  pwrite)
    if [ "$4" = 65536 ]; then echo ENOSPC no room here >&2; exit 1; fi
    dd of="$tmpdir/disk" oflag=seek_bytes iflag=fullblock conv=notrunc seek="$4" bs=64K status=none ;;
  flush | cache) ;;
  trim) fallocate -p -o "$4" -l "$3" "$tmpdir/disk" ;;
  zero)
    if [ "$4" = 131072 ]; then echo EOPNOTSUPP not here >&2; exit 1; fi
    fallocate -p -n -o "$4" -l "$3" "$tmpdir/disk" ;;
  extents) echo 0 64K; echo 64K 1M hole,zero ;;
  *) exit 2 ;;
esac
