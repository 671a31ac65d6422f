//! One opened card: its context, one stream, and what the program must know about it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, result, sys};
use cudarc::nvrtc::Ptx;

use super::error::{CudaError, During};
use super::image::{self, Target};
use crate::parallel::collective::Gate;

/// CUDA 13.0: what the kernels are built with.
const OLDEST_DRIVER: i32 = 13000;

/// What the driver says about a card, without opening it.
#[derive(Clone, Debug)]
pub struct Card {
    pub ordinal: usize,
    pub name: String,
    pub capability: (i32, i32),
    /// `None`: this build holds no machine code for it.
    pub target: Option<Target>,
    /// Bytes of memory.
    pub memory: usize,
}

/// Version of the CUDA driver as 1000 x major + 10 x minor, or why there is none. Never panics.
pub fn driver_version() -> Result<i32, CudaError> {
    // SAFETY: only tries to open the library by name.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the library is there and `version` outlives the call; this entry point exists in every driver and needs no cuInit.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().during("asking for the driver version")?;
    Ok(version)
}

/// Every card the driver sees. Errors say why there is none.
pub fn cards() -> Result<Vec<Card>, CudaError> {
    driver_version()?;
    match result::init() {
        Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => return Err(CudaError::NoCard),
        other => other.during("starting the CUDA driver")?,
    }
    let count = result::device::get_count().during("counting cards")?;
    if count == 0 {
        return Err(CudaError::NoCard);
    }
    (0..count)
        .map(|i| {
            let device = result::device::get(i).during("looking at a card")?;
            let name = result::device::get_name(device).during("asking a card's name")?;
            use sys::CUdevice_attribute_enum::{
                CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
            };
            // SAFETY: `device` comes from the driver.
            let attribute = |a| unsafe { result::device::get_attribute(device, a) }.during("asking a card's capability");
            let capability = (attribute(MAJOR)?, attribute(MINOR)?);
            // SAFETY: as above.
            let memory = unsafe { result::device::total_mem(device) }.during("asking a card's memory")?;
            Ok(Card { ordinal: i as usize, memory, name, capability, target: Target::for_capability(capability) })
        })
        .collect()
}

/// The cards that `ranks` ranks would use, or why there are not enough.
///
/// # Errors
/// Kernels, driver or cards are missing, or a card among the first `ranks` has another capability.
pub fn usable_cards(ranks: usize) -> Result<Vec<Card>, CudaError> {
    if !image::built() {
        return Err(CudaError::BuiltWithout);
    }
    let driver = driver_version()?;
    if driver < OLDEST_DRIVER {
        return Err(CudaError::OldDriver { found: driver });
    }
    let mut cards = cards()?;
    if cards.len() < ranks {
        return Err(CudaError::NoSuchCard { ordinal: ranks - 1, count: cards.len() });
    }
    cards.truncate(ranks);
    match cards.iter().find(|card| card.target.is_none()) {
        Some(card) => Err(CudaError::Unsupported { name: card.name.clone(), capability: card.capability }),
        None => Ok(cards),
    }
}

/// Freed device memory stays with the process: giving gigabytes back and mapping them again costs seconds.
fn keep_freed_memory(context: &CudaContext) -> Result<(), CudaError> {
    let (mut pool, mut threshold) = (std::ptr::null_mut(), u64::MAX);
    // SAFETY: both calls write to, or read from, locals that outlive them; the device belongs to this context.
    unsafe {
        sys::cuDeviceGetDefaultMemPool(&mut pool, context.cu_device()).result().during("asking for the memory pool")?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()).result().during("keeping freed memory")
    }
}

/// An opened card. Create and use it on the thread that will launch: contexts and graphs belong to threads.
pub struct Gpu {
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    pub name: String,
    pub capability: (i32, i32),
    pub target: Target,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// CUDA driver version, 1000 x major + 10 x minor.
    pub driver: i32,
    /// Fatbins used instead of those in this binary.
    fatbins: Option<PathBuf>,
    /// Where the ranks of this process meet; `None` for a lone one.
    pub(super) peers: Option<Arc<Gate>>,
}

impl Gpu {
    /// Opens card `ordinal`. Errors name what is missing: kernels, driver, its version, the card or its capability.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        if !image::built() {
            return Err(CudaError::BuiltWithout);
        }
        let driver = driver_version()?;
        if driver < OLDEST_DRIVER {
            return Err(CudaError::OldDriver { found: driver });
        }
        let cards = cards()?;
        let card = cards.get(ordinal).ok_or(CudaError::NoSuchCard { ordinal, count: cards.len() })?.clone();
        let Some(target) = card.target else {
            return Err(CudaError::Unsupported { name: card.name, capability: card.capability });
        };
        let context = CudaContext::new(ordinal).during("opening the card")?;
        // SAFETY: done before any allocation. Everything runs on the one stream below, so nothing relies on tracked events,
        // and a capture would trip over them.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().during("creating a stream")?;
        keep_freed_memory(&context)?;
        let sms = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).during("asking a card's size")?;
        Ok(Self {
            context,
            stream,
            name: card.name,
            capability: card.capability,
            target,
            sms: sms as u32,
            driver,
            fatbins: None,
            peers: None,
        })
    }

    /// Takes `NAME.fatbin` from `folder`, where it holds one, instead of this binary's: to try kernels without building everything.
    pub fn try_fatbins(&mut self, folder: &Path) {
        self.fatbins = Some(folder.to_owned());
    }

    /// SHA-256 of the measured kernels' machine code; empty when fatbins from a folder are in use.
    pub fn kernel_sha256(&self) -> &'static str {
        if self.fatbins.is_some() { "" } else { image::KERNEL_SHA256 }
    }

    /// Loads one kernel file of this binary (or of the folder being tried).
    pub fn module(&self, name: &'static str) -> Result<Arc<CudaModule>, CudaError> {
        let tried = self.fatbins.as_ref().and_then(|folder| std::fs::read(folder.join(format!("{name}.fatbin"))).ok());
        let bytes = tried.or_else(|| image::fatbin(name).map(<[u8]>::to_vec)).ok_or(CudaError::BuiltWithout)?;
        self.context.load_module(Ptx::from_binary(bytes)).during("loading machine code")
    }

    /// A kernel of a loaded file that may use `shared` bytes of dynamic shared memory.
    pub fn function(&self, module: &Arc<CudaModule>, name: &str, shared: u32) -> Result<CudaFunction, CudaError> {
        let function = module.load_function(name).during("finding a kernel")?;
        if shared > 0 {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, shared as i32).during("reserving shared memory")?;
        }
        // Not at its first launch, when it could find the card busy: see `alone`.
        // SAFETY: a function of a loaded module.
        unsafe { sys::cuFuncLoad(function.cu_function()) }.result().during("loading a kernel")?;
        Ok(function)
    }

    /// Waits until all ranks of this process are here. A lone rank goes on.
    pub(super) fn meet(&self) -> Result<(), CudaError> {
        self.peers.as_ref().map_or(Ok(()), |gate| gate.wait().map_err(|_| CudaError::RankLost))
    }

    /// Runs what may wait for the card, or make others wait, while no rank has anything in flight (see [`super::collective`]). All ranks
    /// must come here in the same order.
    pub(super) fn alone<T, E: From<CudaError>>(&self, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        if self.peers.is_none() {
            return body();
        }
        self.synchronize()?;
        self.meet()?;
        let done = body();
        self.meet()?;
        done
    }

    /// Waits for everything enqueued, and reports an error of any launch or free since the last call.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize().during("waiting for the card")?;
        self.context.check_err().during("work enqueued earlier")
    }

    /// Enqueues one kernel. `arguments` point at its parameters in order. Does not allocate, copy or wait, so it may be captured.
    ///
    /// # Safety
    /// The pointers must point at values of the kernel's parameter types, and the device pointers in them must stay valid until
    /// the kernel (or the last replay of a graph that holds it) has run.
    pub unsafe fn launch(
        &self,
        function: &CudaFunction,
        grid: (u32, u32, u32),
        threads: u32,
        shared: u32,
        arguments: &mut [*mut std::ffi::c_void],
    ) -> Result<(), CudaError> {
        self.context.bind_to_thread().during("binding the context")?;
        // SAFETY: promised by the caller.
        unsafe { result::launch_kernel(function.cu_function(), grid, (threads, 1, 1), shared, self.stream.cu_stream(), arguments) }
            .during("launching a kernel")
    }

    /// Enqueues one kernel whose parameters take 8 bytes or less each ([`super::buffers::Argument::bits`]).
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: the values must match the kernel's parameters in order and type.
    pub unsafe fn enqueue(
        &self,
        function: &CudaFunction,
        grid: (u32, u32, u32),
        threads: u32,
        shared: u32,
        values: &mut [u64],
    ) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { self.launch(function, grid, threads, shared, &mut addresses(values)[..values.len()]) }
    }

    /// Enqueues one kernel as a programmatic dependent of the one before it: it may start while that one drains. May be captured.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]; and the kernel waits for its predecessor before it touches what others write.
    pub unsafe fn launch_dependent(
        &self,
        function: &CudaFunction,
        grid: (u32, u32, u32),
        threads: u32,
        shared: u32,
        arguments: &mut [*mut std::ffi::c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { self.launch_clusters(function, grid, threads, shared, 1, arguments) }
    }

    /// The same in clusters of `cluster` blocks along x.
    ///
    /// # Safety
    /// As for [`Gpu::launch_dependent`].
    pub unsafe fn launch_clusters(
        &self,
        function: &CudaFunction,
        grid: (u32, u32, u32),
        threads: u32,
        shared: u32,
        cluster: u32,
        arguments: &mut [*mut std::ffi::c_void],
    ) -> Result<(), CudaError> {
        use sys::CUlaunchAttributeID::{
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as CLUSTER, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as DEPENDENT,
        };
        self.context.bind_to_thread().during("binding the context")?;
        let dims = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        let mut attributes = [
            (DEPENDENT, sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 }),
            (CLUSTER, sys::CUlaunchAttributeValue { clusterDim: dims }),
        ]
        .map(|(id, value)| sys::CUlaunchAttribute { id, pad: [0; 4], value });
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: if cluster > 1 { 2 } else { 1 },
        };
        // SAFETY: `config` and its attributes outlive the call; the rest is promised by the caller.
        unsafe { sys::cuLaunchKernelEx(&config, function.cu_function(), arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .during("launching a kernel")
    }

    /// The same for kernels whose parameters take 8 bytes or less each.
    ///
    /// # Safety
    /// As for [`Gpu::launch_dependent`] and [`Gpu::enqueue`].
    pub unsafe fn enqueue_dependent(
        &self,
        function: &CudaFunction,
        grid: (u32, u32, u32),
        threads: u32,
        shared: u32,
        values: &mut [u64],
    ) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { self.launch_dependent(function, grid, threads, shared, &mut addresses(values)[..values.len()]) }
    }
}

/// Where each value lies, as a launch wants it. A kernel has at most 32 parameters.
fn addresses(values: &mut [u64]) -> [*mut std::ffi::c_void; 32] {
    assert!(values.len() <= 32, "{} parameters of a kernel, wanted at most 32", values.len());
    let mut addresses = [std::ptr::null_mut(); 32];
    for (address, value) in addresses.iter_mut().zip(values) {
        *address = std::ptr::from_mut(value).cast();
    }
    addresses
}
