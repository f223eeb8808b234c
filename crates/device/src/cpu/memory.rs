//! Memory of the CPU device, and the operands of one operation as slices.
//!
//! Knows no operation: what an operand is comes from the table ([`crate::ops`]).

use crate::device::{HostBytes, View};
use crate::ops::{Access, GROUP, Op, Operand};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ops::Range;
use std::ptr::NonNull;

/// Where every buffer starts: a multiple of this many bytes.
const ALIGNMENT: usize = 16 << 10;

/// One buffer: memory of our own, or memory of the host that is only read.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
}

enum Owner {
    /// Allocated here; `start` lies inside, at the first aligned byte.
    Us { allocation: NonNull<u8>, layout: Layout },
    /// Adopted. Held so that the bytes live as long as the buffer.
    Host(#[allow(dead_code)] HostBytes),
}

// SAFETY: a buffer is plain memory that nothing else points to (`Us`), or shared bytes that are
// Send and Sync themselves and that we only read (`Host`).
unsafe impl Send for Buffer {}

impl Buffer {
    /// Zeroed memory. `None` if the system has none. Pages are taken when they are first touched.
    pub fn zeroed(bytes: u64) -> Option<Buffer> {
        let len = usize::try_from(bytes).ok()?;
        // The alignment is made by hand: asked for an alignment of its own, the allocator would
        // clear the memory byte by byte and so touch every page.
        let layout = Layout::from_size_align(len.checked_add(ALIGNMENT)?, 16).ok()?;
        // SAFETY: the layout's size is not zero.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let skip = allocation.as_ptr().align_offset(ALIGNMENT);
        // SAFETY: skip < ALIGNMENT, and the allocation is ALIGNMENT longer than `len`.
        let start = unsafe { allocation.add(skip) };
        Some(Buffer { start, len, owner: Owner::Us { allocation, layout } })
    }

    /// Part of the host's bytes, in place. Panics if the range leaves them.
    pub fn adopted(bytes: HostBytes, range: Range<usize>) -> Buffer {
        let slice = &(*bytes).as_ref()[range];
        let (start, len) = (NonNull::from(slice).cast(), slice.len());
        Buffer { start, len, owner: Owner::Host(bytes) }
    }

    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// The bytes of `view`, which lies in this buffer. Panics if it does not fit.
    pub fn bytes(&self, view: View) -> &[u8] {
        let start = self.offset(view, view.bytes);
        // SAFETY: `offset` checked the range; it is initialised memory that lives as long as
        // `self`, and only `bytes_mut` and `Operands::write` write to it, which exclude this.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(start), view.bytes as usize) }
    }

    /// The bytes of `view`, to be written. Panics if it does not fit or the buffer is the host's.
    pub fn bytes_mut(&mut self, view: View) -> &mut [u8] {
        let start = self.offset(view, view.bytes);
        self.assert_writable();
        // SAFETY: `offset` checked the range, the memory is ours, and `self` is borrowed mutably.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().add(start), view.bytes as usize)
        }
    }

    fn offset(&self, view: View, bytes: u64) -> usize {
        assert!(
            view.offset.checked_add(bytes).is_some_and(|end| end <= self.len()),
            "view {view:?} leaves its buffer of {} bytes",
            self.len
        );
        view.offset as usize
    }

    fn assert_writable(&self) {
        assert!(matches!(self.owner, Owner::Us { .. }), "adopted memory is never written");
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Owner::Us { allocation, layout } = self.owner {
            // SAFETY: allocated in `zeroed` with this layout, and freed only here.
            unsafe { dealloc(allocation.as_ptr(), layout) }
        }
    }
}

// Operands are little endian, and used as they are.
const _: () = assert!(cfg!(target_endian = "little"));

/// Types that any bytes are a value of.
///
/// # Safety
/// Every bit pattern is valid, there is no padding, and the alignment is 4 at most.
pub unsafe trait Plain: Copy + Sync + 'static {}
// SAFETY: integers and floats.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// A quantised matrix, as in `dtype::q4` and `dtype::q8`. `codes` holds nibbles or bytes.
#[derive(Clone, Copy)]
pub struct Quantised<'a> {
    pub codes: &'a [u8],
    /// A scale (low half) and a bias (high half), both bf16, for every 64 elements.
    pub pairs: &'a [u32],
}

impl<'a> Quantised<'a> {
    /// The part from element `start` on, `n` elements long. Both are multiples of 64.
    pub fn part(self, start: usize, n: usize) -> Quantised<'a> {
        let group = GROUP as usize;
        assert!(start.is_multiple_of(group) && n.is_multiple_of(group), "{start}+{n}: split group");
        let per_group = self.codes.len() / self.pairs.len().max(1);
        let (first, groups) = (start / group, n / group);
        Quantised {
            codes: &self.codes[first * per_group..][..groups * per_group],
            pairs: &self.pairs[first..][..groups],
        }
    }
}

/// The scale and the bias of a group.
#[inline(always)]
pub fn scale_and_bias(pair: u32) -> (f32, f32) {
    (f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000))
}

const MOST: usize = 12;

/// The operands of one operation as slices, by their names in its row. Each operand that is
/// written is handed out once, so that no two slices can alias.
pub struct Operands<'m> {
    buffers: &'m [Buffer],
    kernel: &'static str,
    list: [Option<Operand>; MOST],
    taken: [Cell<bool>; MOST],
}

impl<'m> Operands<'m> {
    /// Checks `op`. The exclusive borrow says that nothing else uses the buffers meanwhile.
    pub fn new(buffers: &'m mut [Buffer], op: &Op) -> Operands<'m> {
        op.check();
        let mut list = [None; MOST];
        let mut n = 0;
        op.operands(|operand| {
            list[n] = Some(operand);
            n += 1;
        });
        Operands { buffers, kernel: op.kernel(), list, taken: Default::default() }
    }

    /// An operand that is only read, whole.
    pub fn read<T: Plain>(&self, name: &str) -> &'m [T] {
        let (_, operand) = self.find(name);
        assert!(operand.access == Access::Read, "{}.{name} is written", self.kernel);
        let (start, len) = self.locate::<T>(operand);
        // SAFETY: `locate` checked range and alignment. `Op::check` showed that nothing which the
        // operation writes overlaps this operand, and `new` borrowed the buffers exclusively.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    /// An operand that is written, whole. Panics the second time.
    pub fn write<T: Plain>(&self, name: &str) -> &'m mut [T] {
        let (index, operand) = self.find(name);
        assert!(operand.access != Access::Read, "{}.{name} is only read", self.kernel);
        assert!(!self.taken[index].replace(true), "{}.{name} is taken", self.kernel);
        self.buffers[operand.view.buffer as usize].assert_writable();
        let (start, len) = self.locate::<T>(operand);
        // SAFETY: as in `read`; the memory is ours, `Op::check` showed that no other operand
        // overlaps this one, and `taken` that it was not handed out before.
        unsafe { std::slice::from_raw_parts_mut(start.cast_mut(), len) }
    }

    /// A 4-bit matrix.
    pub fn q4(&self, name: &str) -> Quantised<'m> {
        self.quantised(name, GROUP as usize / 2)
    }

    /// An 8-bit matrix.
    pub fn q8(&self, name: &str) -> Quantised<'m> {
        self.quantised(name, GROUP as usize)
    }

    fn quantised(&self, name: &str, codes_per_group: usize) -> Quantised<'m> {
        let words = self.read::<u32>(name);
        let groups = words.len() * 4 / (codes_per_group + 4);
        let (codes, pairs) = words.split_at(groups * codes_per_group / 4);
        // SAFETY: the same memory as bytes.
        let codes =
            unsafe { std::slice::from_raw_parts(codes.as_ptr().cast::<u8>(), codes.len() * 4) };
        Quantised { codes, pairs }
    }

    fn find(&self, name: &str) -> (usize, &Operand) {
        let found = self.list.iter().flatten().enumerate().find(|(_, o)| o.name == name);
        found.unwrap_or_else(|| panic!("{} has no operand {name}", self.kernel))
    }

    fn locate<T: Plain>(&self, operand: &Operand) -> (*const T, usize) {
        let buffer = &self.buffers[operand.view.buffer as usize];
        let offset = buffer.offset(operand.view, operand.bytes);
        // SAFETY: the offset was checked.
        let start = unsafe { buffer.start.as_ptr().add(offset) };
        assert!(start.cast::<T>().is_aligned(), "{}.{}: misaligned", self.kernel, operand.name);
        (start.cast(), operand.bytes as usize / size_of::<T>())
    }
}
