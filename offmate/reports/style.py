"""Style and script of the HTML picture, kept small because every notebook cell that shows a picture repeats them."""

STYLE = """
.om{--paper:#fff;--ink:#1b1f24;--soft:#59636e;--line:#e3e6ea;--band:#f3f5f7;--tip:#1b1f24;--tipink:#fff;
--stall:#d55e00;color-scheme:light dark;margin:0;padding:12px;background:var(--paper);color:var(--ink);
font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;position:relative;
box-sizing:border-box}
@media (prefers-color-scheme:dark){.om{--paper:#15181c;--ink:#e6e9ed;--soft:#9aa4af;--line:#2b3138;--band:#1e2329;
--tip:#e6e9ed;--tipink:#15181c;--stall:#ff8a3d}}
.om *{box-sizing:border-box}
.om h2{font-size:16px;margin:0}.om h3{font-size:14px;margin:18px 0 0}.om p{margin:2px 0}
.om figcaption p{color:var(--soft);max-width:110ch}
.om-top{display:flex;justify-content:space-between;gap:12px;flex-wrap:wrap}
.om-zoom{color:var(--soft);font-size:12px;display:none}.om-live .om-zoom{display:inline}
.om-zoom button{font:inherit;color:inherit;background:var(--band);border:1px solid var(--line);border-radius:4px;
margin-left:3px;padding:0 6px;cursor:pointer}.om-zoom button.on{color:var(--ink);border-color:var(--soft)}
.om .om-head{margin:10px 0 2px;font-size:14px}
.om .om-legend{display:flex;flex-wrap:wrap;gap:2px 16px;color:var(--soft);font-size:12px;margin:4px 0 8px}
.om-legend small{color:var(--ink);font-size:12px}.om-note{margin-left:auto}
.om-key{display:inline-block;width:12px;height:12px;border-radius:2px;vertical-align:-2px}
.om-ramp{display:inline-block;width:120px;height:10px;border-radius:2px;margin:0 2px}
.om-grid{display:flex}.om-side{flex:0 0 92px}
.om-scroll{flex:1;overflow-x:auto;min-width:0}.om-wide{position:relative;width:100%;min-width:320px}
.om-phases,.om-axis{position:relative;height:20px}
.om-phases b{position:sticky;left:5px;font-weight:400}
.om-phases span{position:absolute;overflow:clip;white-space:nowrap;color:var(--soft);font-size:12px;
border-left:2px solid var(--soft);padding-left:5px;height:18px}
.om-row{position:relative;height:34px;margin-bottom:4px}
.om-scroll .om-row{background:var(--band);overflow:hidden}
.om-label{display:flex;flex-direction:column;justify-content:center;line-height:1.2;white-space:nowrap}
.om-label small{color:var(--soft);font-size:11px}
.om-row svg{position:absolute;inset:0;width:100%;height:100%;display:block}
.om-row rect:hover{filter:brightness(1.3)}
.om-b{position:absolute;top:0;bottom:0;container-type:inline-size;overflow:hidden;pointer-events:none}
.om-b s{display:none;font:11px/34px system-ui,"DejaVu Sans",sans-serif;text-decoration:none;text-align:center}
@container (min-width:27px){.om-b s{display:block}}
.om-key.om-upd{background:#2b8a9b;height:6px;vertical-align:1px}
.om-stall{position:absolute;top:0;bottom:0;background:repeating-linear-gradient(-45deg,var(--stall) 0 3px,
var(--paper) 3px 5px);box-shadow:inset 0 -4px var(--stall)}
.om-stall.om-key{position:static}
.om-line{position:absolute;top:0;bottom:0;border-left:1px solid var(--line);pointer-events:none}
.om-axis span{position:absolute;font-size:11px;color:var(--soft);transform:translateX(-50%);white-space:nowrap}
.om-axis span:first-child{transform:none}
.om .om-fine{display:none}.om-zoomed .om-fine{display:inline}
.om-mem{position:relative;height:200px;margin-top:4px}
.om-side .om-mem span{position:absolute;right:8px;transform:translateY(50%);font-size:11px;color:var(--soft)}
.om-mem svg{position:absolute;inset:0;width:100%;height:100%;display:block}
.om-scroll .om-mem{border-bottom:1px solid var(--soft)}
.om-budget{position:absolute;left:0;right:0;border-top:1.5px dashed var(--ink);pointer-events:none}
.om-budget span{position:sticky;float:left;left:4px;font-size:11px;line-height:1;padding:1px 3px;margin-top:-12px;
background:var(--paper)}
.om-hair{position:absolute;top:0;bottom:0;border-left:1px solid var(--ink);pointer-events:none}
.om-tip{position:fixed;z-index:9;background:var(--tip);color:var(--tipink);padding:6px 9px;border-radius:5px;
font-size:12px;white-space:pre;pointer-events:none;max-width:90vw;overflow:hidden}
.om-tip table{border-spacing:0}.om-tip td{padding:0 10px 0 0}.om-tip td+td{text-align:right;padding:0}
""".strip()

SCRIPT = """
(()=>{const root=document.currentScript.parentElement,tip=root.querySelector('.om-tip');root.classList.add('om-live');
root.querySelectorAll('[title]').forEach(e=>{e.dataset.tip=e.title;e.removeAttribute('title')});
root.querySelectorAll('rect>title').forEach(e=>{e.parentNode.dataset.tip=e.textContent;e.remove()});
const put=e=>{tip.hidden=false;const r=tip.getBoundingClientRect();
tip.style.left=Math.max(4,Math.min(e.clientX+14,innerWidth-r.width-6))+'px';
tip.style.top=(e.clientY+18+r.height>innerHeight?e.clientY-r.height-12:e.clientY+18)+'px'};
const size=b=>{for(const[u,n]of[[2**40,'TiB'],[2**30,'GiB'],[2**20,'MiB'],[2**10,'KiB']])
if(b>=u)return(b/u).toPrecision(b/u>=1000?4:3)+' '+n;return b+' B'};
const time=s=>s>=1?s.toPrecision(4)+' s':s>=1e-3?(s*1e3).toPrecision(4)+' ms':(s*1e6).toPrecision(4)+' µs';
const row=(t,a,b)=>{const r=t.insertRow();r.insertCell().textContent=a;r.insertCell().textContent=b};
root.querySelectorAll('.om-data').forEach((d,i)=>{const data=JSON.parse(d.textContent),m=data.moments,
mem=root.querySelectorAll('.om-scroll .om-mem')[i],hair=mem.querySelector('.om-hair');
mem.addEventListener('mousemove',e=>{const r=mem.getBoundingClientRect(),x=(e.clientX-r.left)/r.width*data.columns;
let a=0,b=m.length-1;while(a<b){const c=(a+b+1)>>1;m[c][0]<=x?a=c:b=c-1}
const v=m[a].slice(2),t=document.createElement('table');
row(t,'at '+time(x/data.columns*data.end_s),size(v.reduce((p,q)=>p+q,0)));
for(let k=v.length-1;k>=0;k--)if(v[k])row(t,data.kinds[k],size(v[k]));
row(t,m[a][1],'');
tip.replaceChildren(t);hair.hidden=false;hair.style.left=(e.clientX-r.left)+'px';put(e);e.stopPropagation()});
mem.addEventListener('mouseleave',()=>{hair.hidden=true;tip.hidden=true})});
root.addEventListener('mousemove',e=>{const b=e.target.closest('[data-tip]');
if(!b){tip.hidden=true;return}tip.textContent=b.dataset.tip;put(e)});
root.addEventListener('mouseleave',()=>{tip.hidden=true});
const buttons=root.querySelectorAll('[data-zoom]'),zoom=z=>{
buttons.forEach(b=>b.classList.toggle('on',b.dataset.zoom==z));
root.classList.toggle('om-zoomed',z>7);root.querySelectorAll('.om-scroll').forEach(s=>{const w=s.firstElementChild,

mid=(s.scrollLeft+s.clientWidth/2)/w.offsetWidth;w.style.width=100*z+'%';
s.scrollLeft=mid*w.offsetWidth-s.clientWidth/2})};
buttons.forEach(b=>b.addEventListener('click',()=>zoom(+b.dataset.zoom)));zoom(1)})()
""".strip()
