//! The operations of the device contract, each on the loops of its module. Called through `Device`.

use super::*;

impl Device for CpuDevice {
    type Matrix = PanelMatrix;
    type Table = CpuTable;
    type Vector = Vec<f32>;
    type Experts = CpuExperts;
    type Absorbed = CpuAbsorbed;
    type Act = CpuAct;
    type Latents = CpuLatents;
    type Contexts = CpuContexts;
    type Rows = CpuRows;
    type Round = CpuRound;

    fn matrix(&self, weights: Matrix<'_>) -> Result<PanelMatrix> {
        Ok(PanelMatrix::pack(&weights.data, weights.rows, weights.columns))
    }

    fn table(&self, weights: Matrix<'_>) -> Result<CpuTable> {
        Ok(CpuTable { n: weights.rows, width: weights.columns, data: weights.data.into_owned() })
    }

    fn vector(&self, values: &[f32]) -> Result<Vec<f32>> {
        Ok(values.to_vec())
    }

    fn experts(&self, weights: &[HostExpert<'_>]) -> Result<CpuExperts> {
        let mut experts = CpuExperts { gate_up: Vec::new(), down: Vec::new() };
        let weights_of = |expert: &HostExpert<'_>| 3 * expert.gate.rows * expert.gate.columns;
        let unpacked = 2 * weights.iter().map(weights_of).sum::<usize>() <= UNPACKED_EXPERTS;
        for expert in weights {
            multiple_of_lanes("the expert width of a rank", expert.gate.rows)?;
            multiple_of_lanes("the hidden size", expert.down.rows)?;
            experts.gate_up.push(expert_matrix(&[&expert.gate, &expert.up], unpacked));
            experts.down.push(expert_matrix(&[&expert.down], unpacked));
        }
        Ok(experts)
    }

    fn absorbed(&self, kv_b: Matrix<'_>, shape: MlaShape) -> Result<CpuAbsorbed> {
        multiple_of_lanes("kv_lora_rank + qk_rope_head_dim", shape.cache_width())?;
        multiple_of_lanes("kv_lora_rank", shape.latent)?;
        multiple_of_lanes("the query head width", shape.query_width())?;
        multiple_of_lanes("v_head_dim", shape.value)?;
        Ok(CpuAbsorbed::pack(&kv_b, shape))
    }

    fn act(&self, rows: usize, width: usize) -> Result<CpuAct> {
        Ok(CpuAct { data: vec![0.0; rows * width], width })
    }

    fn latents(&self, layers: usize, slots: usize, shape: MlaShape) -> Result<CpuLatents> {
        Ok(CpuLatents::new(layers, slots, shape.cache_width()))
    }

    fn contexts(&self, layers: usize, slots: usize, shape: GqaShape) -> Result<CpuContexts> {
        multiple_of_lanes("the drafter's head width", shape.head)?;
        Ok(CpuContexts::new(layers, slots, shape))
    }

    fn rows(&self, capacity: usize) -> Result<CpuRows> {
        Ok(CpuRows::with_capacity(capacity))
    }

    fn round(&self, limits: &Limits) -> Result<CpuRound> {
        Ok(CpuRound::new(limits))
    }

    fn set_rope(&mut self, target: RopeTable, drafter: Option<RopeTable>) -> Result<()> {
        self.rope = target;
        self.draft_rope = drafter.unwrap_or_default();
        Ok(())
    }

    fn embed(&self, table: &CpuTable, first: u32, rows: &CpuRows, out: &mut CpuAct) -> Result<()> {
        for (row, &token) in rows.tokens.iter().enumerate() {
            let out = out.row_mut(row);
            match token.checked_sub(first).filter(|&at| (at as usize) < table.n) {
                Some(at) => {
                    let from = &table.data[at as usize * table.width..(at as usize + 1) * table.width];
                    out.iter_mut().zip(from).for_each(|(out, value)| *out = value.to_f32());
                }
                None => out.fill(0.0),
            }
        }
        Ok(())
    }

    fn rms_norm(&self, x: &CpuAct, weight: &Vec<f32>, eps: f32, rows: &CpuRows, out: &mut CpuAct) -> Result<()> {
        norm_rows(self.isa, &x.data[..rows.len() * x.width], weight, eps, &mut out.data);
        Ok(())
    }

    fn linear(&self, x: &CpuAct, weight: &PanelMatrix, rows: &CpuRows, out: &mut CpuAct) -> Result<()> {
        let stride = out.width;
        self.linear_rows(&x.data, x.width, rows.len(), weight, &mut out.data, stride);
        Ok(())
    }

    fn add_reduced(&self, x: &mut CpuAct, y: &mut CpuAct, rows: &CpuRows) -> Result<()> {
        self.all_reduce(y, rows)?;
        let width = x.width;
        let shared = SharedMut::new(&mut x.data);
        split(rows.len(), 64, &|range| {
            let (at, len) = (range.start * width, range.len() * width);
            // SAFETY: rows are disjoint.
            let x = unsafe { shared.range(at, len) };
            x.iter_mut().zip(&y.data[at..at + len]).for_each(|(x, y)| *x += y);
        });
        Ok(())
    }

    fn add_and_norm(
        &self,
        x: &CpuAct,
        added: Option<&mut CpuAct>,
        sum: &mut CpuAct,
        norm: &Vec<f32>,
        eps: f32,
        rows: &CpuRows,
        normed: &mut CpuAct,
    ) -> Result<()> {
        let added = match added {
            Some(added) => {
                self.all_reduce(added, rows)?;
                Some(&*added)
            }
            None => None,
        };
        let (isa, width, sums, outs) = (self.isa, x.width, SharedMut::new(&mut sum.data), SharedMut::new(&mut normed.data));
        split(rows.len(), 16, &|range| {
            for row in range {
                // SAFETY: rows are disjoint.
                let (sum, out) = unsafe { (sums.range(row * width, width), outs.range(row * width, width)) };
                match added {
                    Some(added) => sum.iter_mut().zip(x.row(row)).zip(added.row(row)).for_each(|((sum, x), y)| *sum = x + y),
                    None => sum.copy_from_slice(x.row(row)),
                }
                layers::rms_norm(isa, sum, norm, eps, out);
            }
        });
        Ok(())
    }

    fn all_reduce(&self, x: &mut CpuAct, rows: &CpuRows) -> Result<()> {
        match &self.collective {
            Some(collective) => Ok(collective.all_reduce(&mut x.data[..rows.len() * x.width])?),
            None => Ok(()),
        }
    }

    fn gather_columns(&self, x: &CpuAct, rows: &CpuRows, out: &mut CpuAct) -> Result<()> {
        let (from, to) = (&x.data[..rows.len() * x.width], &mut out.data[..rows.len() * out.width]);
        match &self.collective {
            Some(collective) => collective.gather_columns(from, x.width, to)?,
            None => to.copy_from_slice(from),
        }
        Ok(())
    }

    fn mla_project(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        h: &CpuAct,
        rows: &CpuRows,
        latents: &mut CpuLatents,
        layer: usize,
        q: &mut CpuAct,
    ) -> Result<()> {
        self.store_latents(weights, shape, h, rows, latents, layer);
        self.queries(weights, shape, h, rows, q);
        Ok(())
    }

    fn mla_latents_normed(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        input: Residual<'_, Self>,
        rows: &CpuRows,
        latents: &mut CpuLatents,
        layer: usize,
        _q: &mut CpuAct,
    ) -> Result<()> {
        self.store_latents(weights, shape, input.settle(self, rows)?, rows, latents, layer);
        Ok(())
    }

    fn verify_attention(
        &self,
        weights: &CpuAbsorbed,
        shape: MlaShape,
        q: &CpuAct,
        rows: &CpuRows,
        latents: &CpuLatents,
        layer: usize,
        out: &mut CpuAct,
    ) -> Result<()> {
        let scratch = &mut *self.scratch.borrow_mut();
        let n = rows.len();
        let queries = sized(&mut scratch.queries, n * shape.heads * shape.cache_width());
        verify::absorb_queries(self.isa, weights, shape, &q.data, n, queries);
        let outputs = sized(&mut scratch.outputs, n * shape.heads * shape.latent);
        let args = VerifyArgs { isa: self.isa, weights, shape, rows, cache: latents, layer, queries, fault: self.fault };
        match self.verify {
            Verify::Off => verify::baseline(&VerifyArgs { fault: None, ..args }, outputs),
            Verify::On => verify::custom(&args, outputs),
            Verify::Validate => {
                let second = sized(&mut scratch.second, n * shape.heads * shape.latent);
                verify::custom(&args, second);
                verify::baseline(&VerifyArgs { fault: None, ..args }, outputs);
                self.validation.borrow_mut().compare(layer, shape.latent, outputs, second);
            }
        }
        verify::expand_outputs(self.isa, weights, shape, outputs, n, &mut out.data);
        Ok(())
    }

    fn prompt_attention(
        &self,
        weights: &CpuAbsorbed,
        shape: MlaShape,
        q: &CpuAct,
        rows: &CpuRows,
        latents: &CpuLatents,
        layer: usize,
        out: &mut CpuAct,
    ) -> Result<()> {
        let kept = &mut self.scratch.borrow_mut().prompt;
        prompt::prompt_attention(self.isa, weights, shape, &q.data, rows, latents, layer, kept, &mut out.data);
        Ok(())
    }

    fn mlp(&self, weights: &Mlp<Self>, h: &CpuAct, rows: &CpuRows, out: &mut CpuAct) -> Result<()> {
        let scratch = &mut *self.scratch.borrow_mut();
        let (n, inner) = (rows.len(), weights.down.k);
        let wide = sized(&mut scratch.wide, n * 2 * inner);
        self.linear_rows(&h.data, h.width, n, &weights.gate_up, wide, 2 * inner);
        let normed = sized(&mut scratch.normed, n * inner);
        let (isa, gates, shared) = (self.isa, &*wide, SharedMut::new(normed));
        split(n, 16, &|range| {
            for row in range {
                let (gate, up) = gates[row * 2 * inner..(row + 1) * 2 * inner].split_at(inner);
                // SAFETY: rows are disjoint.
                layers::swiglu(isa, gate, up, unsafe { shared.range(row * inner, inner) });
            }
        });
        let stride = out.width;
        self.linear_rows(normed, inner, n, &weights.down, &mut out.data, stride);
        Ok(())
    }

    fn moe(&self, weights: &Moe<Self>, h: &CpuAct, rows: &CpuRows, layer: usize, out: &mut CpuAct) -> Result<()> {
        let scratch = &mut self.scratch.borrow_mut().moe;
        let args = MoeArgs {
            router: &weights.router,
            bias: &weights.bias,
            experts: &weights.experts,
            shared_gate_up: &weights.shared.gate_up,
            shared_down: &weights.shared.down,
            top_k: weights.top_k,
            scaling: weights.scaling,
        };
        moe::moe(self.isa, &args, &h.data, h.width, rows.len(), scratch, &mut out.data);
        if let Some(kept) = self.routes.borrow_mut().as_mut() {
            kept.push((layer, scratch.routes.clone()));
        }
        Ok(())
    }

    fn tap(&self, x: &CpuAct, rows: &CpuRows, index: usize, taps: &mut CpuAct) -> Result<()> {
        for row in 0..rows.len() {
            taps.row_mut(row)[index * x.width..(index + 1) * x.width].copy_from_slice(x.row(row));
        }
        Ok(())
    }

    fn draft_context(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        c: &CpuAct,
        rows: &CpuRows,
        contexts: &mut CpuContexts,
        layer: usize,
    ) -> Result<()> {
        let scratch = &mut *self.scratch.borrow_mut();
        let kv = sized(&mut scratch.wide, rows.len() * weights.kv.n);
        self.linear_rows(&c.data, c.width, rows.len(), &weights.kv, kv, weights.kv.n);
        contexts.store(self.isa, shape, &weights.k_norm, kv, rows, &self.draft_rope, layer);
        Ok(())
    }

    fn draft_attention(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        mask: DraftMask,
        h: &CpuAct,
        rows: &CpuRows,
        contexts: &CpuContexts,
        layer: usize,
        out: &mut CpuAct,
    ) -> Result<()> {
        let scratch = &mut *self.scratch.borrow_mut();
        let qkv = sized(&mut scratch.wide, rows.len() * weights.qkv.n);
        self.linear_rows(&h.data, h.width, rows.len(), &weights.qkv, qkv, weights.qkv.n);
        draft::prepare_block(self.isa, shape, &weights.q_norm, &weights.k_norm, rows, &self.draft_rope, qkv);
        draft::draft_attention(&DraftArgs { isa: self.isa, shape, mask, rows, contexts, layer, qkv }, &mut out.data);
        Ok(())
    }

    fn admit(&self, round: &mut CpuRound, request: usize, admission: Admission) -> Result<()> {
        self.scratch.borrow_mut().prompt.forget(request);
        round.admit(request, admission)
    }

    fn retire(&self, round: &mut CpuRound, request: usize) -> Result<()> {
        self.scratch.borrow_mut().prompt.forget(request);
        round.retire(request);
        Ok(())
    }

    fn place_chunk(&self, round: &CpuRound, request: usize, start: usize, tokens: &[u32], rows: &mut CpuRows) -> Result<()> {
        round.place_chunk(request, start, tokens, rows)
    }

    const LAST_ROW_IS_ROOT: bool = true;

    fn last_row(&self, h: &CpuAct, rows: &CpuRows, out: &mut CpuAct, last: &mut CpuRows) -> Result<()> {
        let row = rows.len().checked_sub(1).ok_or_else(|| DeviceError("no last row of an empty pass".into()))?;
        out.row_mut(0).copy_from_slice(h.row(row));
        rows.last_as_root(last);
        Ok(())
    }

    fn begin(&self, round: &mut CpuRound, request: usize, prompt: usize, logits: &CpuAct, mask: Option<&[u32]>) -> Result<()> {
        self.scratch.borrow_mut().prompt.forget(request);
        round.begin(request, prompt, &logits.data, mask)
    }

    fn plan(&self, round: &mut CpuRound, shares: &[Share]) -> Result<()> {
        round.plan(shares)
    }

    fn place_blocks(&self, round: &CpuRound, mask_token: u32, rows: &mut CpuRows) -> Result<()> {
        round.place_blocks(mask_token, rows)
    }

    fn marginals(&self, round: &mut CpuRound, logits: &CpuAct) -> Result<()> {
        round.marginals(&logits.data);
        Ok(())
    }

    fn grow(&self, round: &mut CpuRound) -> Result<()> {
        round.grow();
        Ok(())
    }

    fn place_trees(&self, round: &CpuRound, rows: &mut CpuRows) -> Result<()> {
        round.place_trees(rows)
    }

    fn read_trees(&self, round: &CpuRound) -> Result<Vec<HostTree>> {
        Ok(round.read_trees())
    }

    fn set_masks(&self, round: &mut CpuRound, share: usize, masks: &[u32]) -> Result<()> {
        round.set_masks(share, masks);
        Ok(())
    }

    fn sample(&self, round: &mut CpuRound, logits: &CpuAct) -> Result<()> {
        round.sample(&logits.data);
        Ok(())
    }

    fn walk_and_commit(&self, round: &mut CpuRound, latents: &mut CpuLatents, accepted: &mut CpuRows) -> Result<()> {
        round.walk_and_commit(latents, accepted)
    }

    fn gather_taps(&self, taps: &CpuAct, accepted: &CpuRows, out: &mut CpuAct) -> Result<()> {
        for (row, &source) in accepted.sources.iter().enumerate() {
            out.row_mut(row).copy_from_slice(taps.row(source as usize));
        }
        Ok(())
    }

    fn copy_range(&self, x: &CpuAct, from: usize, rows: usize, out: &mut CpuAct, to: usize) -> Result<()> {
        for row in 0..rows {
            out.row_mut(to + row).copy_from_slice(x.row(from + row));
        }
        Ok(())
    }

    fn scatter_rows(&self, x: &CpuAct, places: &[(usize, usize)], out: &mut CpuAct) -> Result<()> {
        for &(from, to) in places {
            out.row_mut(to).copy_from_slice(x.row(from));
        }
        Ok(())
    }

    fn read_round(&self, round: &mut CpuRound) -> Result<Vec<Outcome>> {
        Ok(round.take_outcomes())
    }

    fn prompt_logprobs(&self, logits: &CpuAct, rows: &CpuRows, next: &[u32], top: u32) -> Result<Vec<TokenLogprob>> {
        Ok((0..rows.len().min(next.len())).map(|row| logprobs(logits.row(row), next[row], top as usize)).collect())
    }

    fn read(&self, x: &CpuAct, rows: usize) -> Result<Vec<f32>> {
        Ok(x.data[..rows * x.width].to_vec())
    }

    fn identity(&self) -> DeviceIdentity {
        DeviceIdentity::cpu()
    }

    fn take_validation(&self) -> Vec<LayerDiff> {
        self.validation.borrow_mut().take()
    }

    fn verify_mode(&self) -> Verify {
        self.verify
    }

    fn set_verify(&mut self, mode: Verify) {
        self.verify = mode;
    }
}
